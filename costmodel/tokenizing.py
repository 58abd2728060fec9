"""Samples -> token counts: by a local tokenizer.json and its chat template, or by a stated estimate from characters.

The ``tokenizers`` package splits each batch over all cores in native threads, so no worker processes are started. A chat
template is a program from a stranger: it runs in Jinja's immutable sandbox, as transformers does it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from costmodel.dataset_rows import Sample, content_text
from costmodel.errors import CostModelError, MissingExtraError

# English text under the vocabularies of current models (32,000 to 256,000 tokens).
CHARACTERS_PER_TOKEN: Final = 3.6
# Chinese, Japanese and Korean characters, and others above this code point, are about a token each.
_WIDE: Final = re.compile("[\u2e80-\U0010ffff]")
# What a chat template writes around a turn: start, role, line end, end, line end (ChatML); Llama 3 writes as many.
TEMPLATE_TOKENS_PER_TURN: Final = 5
_MAX_TOKENIZER_BYTES: Final = 256 * 2**20
_SMALLEST_JINJA: Final = (3, 1, 6)  # earlier sandboxes can be escaped


@dataclass(frozen=True, slots=True)
class Count:
    """Tokens of a sample, and of its supervised part where that is told apart."""

    num_tokens: int
    num_supervised_tokens: int | None


class CharacterCounter:
    """Tokens from characters: :data:`CHARACTERS_PER_TOKEN`, one for each wide character, and the template's share."""

    name: str | None = None
    fingerprint = f"characters {CHARACTERS_PER_TOKEN} {TEMPLATE_TOKENS_PER_TURN}"
    num_template_failures = num_without_template = 0

    def count(self, samples: Sequence[Sample]) -> list[Count]:
        return [self._count(sample) for sample in samples]

    def _count(self, sample: Sample) -> Count:
        if sample.num_tokens is not None:
            return Count(sample.num_tokens, sample.num_supervised_tokens)
        if sample.messages is not None:
            return _chat_count([estimated_tokens(_turn_text(turn)) for turn in sample.messages], sample.messages)
        end = 1  # the end-of-text token
        whole = max(1, estimated_tokens(sample.text)) + end
        if sample.completion is None:
            return Count(whole, None)
        return Count(whole, min(whole, estimated_tokens(sample.completion) + end))


def estimated_tokens(text: str) -> int:
    """Tokens of a text by its characters, rounded up."""
    wide = 0 if text.isascii() else len(_WIDE.findall(text))
    return math.ceil((len(text) - wide) / CHARACTERS_PER_TOKEN) + wide


def _turn_text(turn: Mapping[str, Any]) -> str:
    calls = turn.get("tool_calls")
    return content_text(turn.get("content")) + (json.dumps(calls, default=str) if calls else "")


def _chat_count(turn_tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> Count:
    """Turns counted apart, each with a template's usual frame. An answer's end token is supervised with it."""
    answers = [tokens + 1 for tokens, turn in zip(turn_tokens, messages, strict=True) if turn["role"] == "assistant"]
    return Count(sum(turn_tokens) + TEMPLATE_TOKENS_PER_TURN * len(messages), sum(answers) if answers else None)


class TokenizerCounter:
    """Tokens by a ``tokenizer.json``, with the chat template that lies beside it, if one does."""

    def __init__(self, path: str) -> None:
        """``path``: the file, or the folder that holds it (a model's). Never the network. Raises :class:`CostModelError`."""
        folder, file = (path, os.path.join(path, "tokenizer.json")) if os.path.isdir(path) else (os.path.dirname(path), path)
        if not os.path.isfile(file):
            also = ""
            if os.path.isdir(path) and os.path.isfile(os.path.join(path, "tokenizer.model")):
                also = "; it holds a tokenizer.model only: save it once with a fast tokenizer of transformers"
            raise CostModelError(f"{path} is no tokenizer: give a tokenizer.json, or a folder that holds one{also}")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise MissingExtraError("tokenizers", "data", "counting tokens with --tokenizer") from None
        data = _read(file)
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # tokenizers raises plain Exception
            raise CostModelError(f"{file} is not a readable tokenizer.json: {' '.join(str(error).split())}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _json_file(os.path.join(folder, "tokenizer_config.json"))
        source = _template_source(folder, config)
        self._template = _compiled(source, folder) if source else None
        self._tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.name = path
        self.num_template_failures = self.num_without_template = 0
        self.fingerprint = hashlib.sha256(data + (source or "").encode() + json.dumps(self._tokens).encode()).hexdigest()

    def count(self, samples: Sequence[Sample]) -> list[Count]:
        """One :class:`Count` a sample, in order: all texts of the batch go to the tokenizer at once."""
        rendered = [self._render(sample) for sample in samples]
        with_special, without_special = [], []
        for sample, text in zip(samples, rendered, strict=True):
            if sample.num_tokens is not None:
                continue
            if sample.messages is None:
                with_special.append(sample.text)
                without_special += [] if sample.completion is None else [sample.completion]
            elif text is None:  # no template: turn by turn
                without_special += [_turn_text(turn) for turn in sample.messages]
            else:
                without_special += [text, *(_turn_text(turn) for turn in sample.messages if turn["role"] == "assistant")]
        special, plain = iter(self._lengths(with_special, True)), iter(self._lengths(without_special, False))
        counts = []
        for sample, text in zip(samples, rendered, strict=True):
            if sample.num_tokens is not None:
                counts.append(Count(sample.num_tokens, sample.num_supervised_tokens))
            elif sample.messages is None:
                whole = next(special) + 1  # and the end-of-text token
                part = None if sample.completion is None else min(whole, next(plain) + 1)
                counts.append(Count(whole, part))
            elif text is None:
                counts.append(_chat_count([next(plain) for _ in sample.messages], sample.messages))
            else:
                whole = next(plain)
                answers = [next(plain) + 1 for turn in sample.messages if turn["role"] == "assistant"]
                counts.append(Count(whole, min(whole, sum(answers)) if answers else None))
        return counts

    def _lengths(self, texts: list[str], special: bool) -> list[int]:
        texts = [text if text.isascii() else text.encode("utf-8", "replace").decode() for text in texts]  # lone surrogates
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        return [len(encoding) for encoding in encode(texts, add_special_tokens=special)] if texts else []

    def _render(self, sample: Sample) -> str | None:
        """The chat as the template writes it; ``None`` without a template, and for a chat that it refuses."""
        if sample.messages is None:
            return None
        if self._template is None:
            self.num_without_template += 1
            return None
        try:
            return str(
                self._template.render(
                    messages=[dict(turn) for turn in sample.messages],
                    tools=sample.tools,
                    documents=None,
                    add_generation_prompt=False,
                    **self._tokens,
                )
            )
        except Exception:  # the template's own refusals and any fault of it: the chat is counted turn by turn
            self.num_template_failures += 1
            return None


def _read(path: str) -> bytes:
    try:
        if os.path.getsize(path) > _MAX_TOKENIZER_BYTES:
            raise CostModelError(f"{path} is larger than {_MAX_TOKENIZER_BYTES // 2**20} MiB: not a tokenizer")
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise CostModelError(f"cannot read {path}: {error.strerror or error}") from None


def _json_file(path: str) -> dict[str, Any]:
    """A small JSON object, or an empty one where there is none."""
    if not os.path.isfile(path):
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CostModelError(f"{path} is not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _template_source(folder: str, config: Mapping[str, Any]) -> str | None:
    """``chat_template.jinja``, or ``chat_template`` of tokenizer_config.json (one, or several by name)."""
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        return _read(path).decode("utf-8", "replace")
    source = config.get("chat_template")
    if isinstance(source, list):
        by_name = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = by_name.get("default")
    return source if isinstance(source, str) and source else None


def _token_text(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _compiled(source: str, folder: str) -> Any:
    """A chat template, ready to render in the sandbox."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise MissingExtraError("jinja2", "data", "applying the tokenizer's chat template") from None
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < _SMALLEST_JINJA:
        raise CostModelError(
            f"jinja2 {jinja2.__version__} cannot run a stranger's chat template safely; install 3.1.6 or later"
        )

    class Generation(Extension):
        """``{% generation %}`` marks what the model writes; here it is only its body."""

        tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: "01 Jan 2026"  # a date's length, not today's
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CostModelError(f"the chat template in {folder or '.'} is not valid: {error}") from None
