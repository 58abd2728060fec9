"""What is known about models: their ``config.json``, by catalogue id, path or hub id."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from costmodel.arguments import must_be
from costmodel.data_files import DATA_FOLDER, read_table
from costmodel.errors import AmbiguousNameError, CostModelError, UnknownNameError, first_line, short_path
from costmodel.strict_json import read_json_text

HUB_TIMEOUT_SECONDS: Final = 5.0

# What may follow a name without changing which model is meant: "Mixtral-8x7B" is "Mixtral-8x7B-v0.1".
_RELEASE_SUFFIX: Final = re.compile(r"-(hf|base|it|pt|v\d+(\.\d+)*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Where a catalogued config comes from. ``confidence``: "high" where its size equals a published tensor count."""

    model_id: str
    model_type: str
    confidence: str
    source: str


@functools.cache
def _model_rows() -> dict[str, dict[str, str]]:
    return {row["model_id"]: row for row in read_table("models", "index.csv")}


@functools.cache
def _model_ids_by_lower_name() -> dict[str, str]:
    """Lower-case id, or alias -> catalogue id."""
    names = {row["alias"].lower(): row["model_id"] for row in read_table("models", "aliases.csv")}
    names.update((model_id.lower(), model_id) for model_id in _model_rows())
    return names


def list_models() -> tuple[str, ...]:
    """Ids of all catalogued models, sorted."""
    return tuple(_model_rows())


def model_facts(model_id: str) -> ModelFacts:
    """Family and source of a catalogued model, by its exact id."""
    row = _model_rows()[model_id]
    return ModelFacts(model_id, row["model_type"], row["confidence"], row["source"])


def find_model_id(name: str) -> str | None:
    """The catalogue id that ``name`` means, ``None`` if none does.

    Case does not matter; the organisation and a release suffix (``-hf``, ``-v0.1``) may be left out where that leaves
    one model. Raises :class:`AmbiguousNameError` where it leaves several.
    """
    wanted = name.strip().strip("/").lower()
    names = _model_ids_by_lower_name()
    if wanted in names:
        return names[wanted]
    has_organisation = "/" in wanted
    exact, released = set(), set()
    for known, model_id in names.items():
        candidate = known if has_organisation else known.rpartition("/")[2]
        if candidate == wanted:
            exact.add(model_id)
        elif candidate.startswith(wanted) and _RELEASE_SUFFIX.fullmatch(candidate, len(wanted)):
            released.add(model_id)
    matches = exact or released
    if len(matches) > 1:
        raise AmbiguousNameError("model", name, sorted(matches))
    return matches.pop() if matches else None


def find_model_config(model: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` mapping of a model. Data only: nothing is executed.

    ``model`` is a mapping (copied), a path to a ``config.json`` or a folder that holds one, a catalogue id, or, only if
    ``huggingface_hub`` is installed and can reach it (or has it cached), a hub id. Raises :class:`CostModelError`.
    """
    if isinstance(model, Mapping):
        return dict(model)
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str):
        raise must_be("the model", "an id, a path to a config.json, or a config mapping", model)
    name = name.strip()
    if not name:
        raise CostModelError("the model is an empty string; give an id, a path to a config.json, or a config mapping")
    path = os.path.expanduser(name)
    if name.lower().endswith(".json") or os.path.isfile(path) or os.path.isfile(os.path.join(path, "config.json")):
        return _config_from_path(path)
    model_id = find_model_id(name)
    if model_id is not None:
        return _read_json_object(os.path.join(DATA_FOLDER, "models", _model_rows()[model_id]["file"]))
    if os.path.isdir(path):
        return _config_from_path(path)
    return _config_from_hub(name)


def find_towers(name: str) -> dict[str, Any] | None:
    """What a catalogued multimodal model has besides its language model: ``model_type`` of the whole, and ``vision_config``
    and ``audio_config``. ``None`` for others, and for what is in no catalogue (its own config says it)."""
    model_id = find_model_id(name)
    return dict(_towers()[model_id]) if model_id in _towers() else None


@functools.cache
def _towers() -> dict[str, dict[str, Any]]:
    return _read_json_object(os.path.join(DATA_FOLDER, "models", "towers.json"))


def _config_from_path(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        config_path = os.path.join(path, "config.json")
        adapter_path = os.path.join(path, "adapter_config.json")
        if not os.path.isfile(config_path) and os.path.isfile(adapter_path):
            base = _read_json_object(adapter_path).get("base_model_name_or_path")
            named = f": {base}" if base else ", which it does not name"
            raise CostModelError(f"{path} holds a LoRA adapter, not a model; give its base model{named}")
        if not os.path.isfile(config_path):
            raise CostModelError(f"the folder {path} holds no config.json")
        path = config_path
    if not os.path.isfile(path):
        raise CostModelError(f"no such file: {short_path(path)}")
    return _read_json_object(path)


def _read_json_object(path: str) -> dict[str, Any]:
    try:
        value = json.loads(read_json_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CostModelError(f"{path} is not readable JSON: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise CostModelError(f"{path} is not a config: it holds a {type(value).__name__}, not an object")
    return value


def _config_from_hub(name: str) -> dict[str, Any]:
    """``config.json`` of a hub repository, by the installed ``huggingface_hub``: that one file, never code."""
    reason = "it is not in the catalogue"
    if re.fullmatch(r"[\w.\-]+/[\w.\-]+", name):
        try:
            from huggingface_hub import hf_hub_url, try_to_load_from_cache

            # Both are exported at run time only, which a type checker cannot see.
            hub_utils: Any = importlib.import_module("huggingface_hub.utils")
        except ImportError:
            reason += ", and huggingface_hub is not installed to ask the hub"
        else:
            cached = try_to_load_from_cache(name, "config.json")
            if isinstance(cached, str):
                return _read_json_object(cached)
            try:
                # One request: the client's own download retries for half a minute where there is no network.
                response = hub_utils.get_session().get(
                    hf_hub_url(name, "config.json"),
                    headers=hub_utils.build_hf_headers(),
                    timeout=HUB_TIMEOUT_SECONDS,
                )
                response.raise_for_status()
                config = response.json()
            except Exception as error:  # whatever the network, the hub or its client has to say
                reason += f", and the hub gave none ({first_line(error)})"
            else:
                if isinstance(config, dict):
                    return config
                reason += ", and the hub's config.json is not an object"
    nearest = nearest_models(name)
    copy = ", or name the one of these that it is a copy or a tuning of, which has its sizes" if nearest else ""
    way_out = f"{reason}; give a path to its config.json{copy}"
    raise UnknownNameError("model", name, list_models(), way_out=way_out, nearest=nearest)


# --- models whose names are alike -------------------------------------------------------------------------------------

# Words that change neither the family nor the size: how a copy was tuned, stored or packed, and by whom.
_COPY_WORD: Final = re.compile(
    "instruct|chat|base|it|pt|sft|dpo|rlhf|tuned|fine|finetuned?|finetuning|ft|q?lora|adapter|merged|model|my|the|hf|preview|"
    "latest|bnb|gptq|awq|gguf|ggml|mlx|exl|int|fp|bf|nf|bits?|dynamic|quant|quantized|unsloth|meta|v|x"
)
# Tunings that carry a name of their own -> the family that they have the sizes of (the model cards of their makers).
_TUNED_FROM: Final = {
    "alpaca": "llama",
    "dolly": "pythia",
    "guanaco": "llama",
    "openhermes": "mistral",
    "vicuna": "llama",
    "wizardlm": "llama",
}
_SIZE_WORDS: Final = frozenset({"nano", "tiny", "mini", "small", "medium", "large", "xl"})
_MODEL_WORD: Final = re.compile(
    r"\d+x\d+b"  # 8x7b
    r"|\d+k(?![a-z])"  # of context
    r"|[ae]?\d+(?:\.\d+)?[bm](?![a-z])"  # 8b, 0.6b, 135m, a3b, e2b
    r"|(?:int|fp|bf|nf|q)\d+(?:_[a-z0-9_]+)?|\d+bits?"  # how it is stored
    r"|[a-z]+|\d+(?:\.\d+)*"
)
_ALIKE: Final = 0.8  # of two words' letters: a misspelt family
_WEIGHTS: Final = (3.0, 2.0, 1.5)  # family, size, version
_NUM_NEAREST: Final = 3


@dataclass(frozen=True, slots=True)
class _NameParts:
    """What a model's name says: ``Qwen3-30B-A3B-Instruct`` is qwen, 30b and a3b, 3."""

    family: frozenset[str]
    sizes: frozenset[str]
    versions: frozenset[str]


@functools.lru_cache(maxsize=512)
def _name_parts(name: str) -> _NameParts:
    bare = re.sub(r"(?<=\d)_(?=\d)", ".", name.lower().strip("/ ").rpartition("/")[2])  # Qwen-1_8B
    words = _MODEL_WORD.findall(bare)
    sizes = {word for word in words if re.fullmatch(r"\d+x\d+b|[ae]?\d+(\.\d+)?[bm]", word) or word in _SIZE_WORDS}
    versions = {word for word in words if re.fullmatch(r"\d+(\.\d+)*", word) and len(word) < 4}  # longer ones are dates
    family = {word for word in words if word.isalpha() and not _COPY_WORD.fullmatch(word) and word not in _SIZE_WORDS}
    family = {_TUNED_FROM.get(word, word) for word in family}
    return _NameParts(frozenset(family), frozenset(sizes), frozenset(versions))


def nearest_models(name: str) -> list[str]:
    """Up to three catalogued models of the family that ``name`` seems to be of, the nearest in size and version first.

    Without organisations where ``name`` has none. To be shown, never to be taken in place of the one that was asked for.
    """
    asked, known = _name_parts(name[:200]), {model_id: _name_parts(model_id) for model_id in list_models()}
    words = frozenset[str]().union(*(each.family for each in known.values()))
    scores = {model_id: _likeness(asked, each, words) for model_id, each in known.items()}
    best = sorted((-score, model_id) for model_id, score in scores.items() if score > 0)[:_NUM_NEAREST]
    return [model_id if "/" in name else model_id.rpartition("/")[2] for _, model_id in best]


def _likeness(asked: _NameParts, known: _NameParts, words: frozenset[str]) -> float:
    """0 for another family. ``words``: those of all known families; what is one of them is no misspelling of another."""

    def match(one: str) -> float:
        return max((_same_letters(one, other) for other in asked.family - words), default=0.0)

    matches = {one: 1.0 if one in asked.family else match(one) for one in known.family}
    if not any(likeness and len(one) > 1 for one, likeness in matches.items()):  # a letter alone names no family
        return 0.0
    matched = sum(matches.values())
    family = 2 * matched / (len(asked.family) + len(known.family))
    size = 2 * len(asked.sizes & known.sizes) / max(1, len(asked.sizes) + len(known.sizes))
    majors = {version.partition(".")[0] for version in asked.versions}, {each.partition(".")[0] for each in known.versions}
    version = 1.0 if asked.versions == known.versions else 0.5 if majors[0] & majors[1] else 0.0
    return sum(weight * share for weight, share in zip(_WEIGHTS, (family, size, version), strict=True))


def _same_letters(one: str, other: str) -> float:
    alike = 1.0 if one == other else difflib.SequenceMatcher(None, one, other).ratio()
    return alike if alike >= _ALIKE else 0.0
