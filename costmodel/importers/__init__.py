"""Configurations of other tools -> jobs.

``recognise(mapping_or_path)`` names the tool by its keys; ``import_config(path).job`` is the job, with every value traceable
to a key of the file or to the tool's own default, and every key understood, harmless or listed as unknown.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Final

from costmodel.errors import CostModelError, short
from costmodel.importers import axolotl, checkpoint, llamafactory, run_record, training_arguments, trl, wandb_config
from costmodel.importers.reading import ImportedJob, Origin, read_mapping
from costmodel.specs import Job

__all__ = ["TOOLS", "ImportedJob", "Origin", "import_config", "import_mapping", "recognise"]

TOOLS: Final = ("job", "axolotl", "llamafactory", "trl", "checkpoint", "wandb", "run record")

_JOB_KEYS: Final = frozenset(Job.model_fields) | Job._accepted_aliases()
# No training tool has these at the top of its file.
_JOB_MARKERS: Final = frozenset(
    {"model", "gpu", "lengths", "num_samples", "usd_per_gpu_hour", "supervised_fraction", "method"}
)
# Names of the Hugging Face Trainer that none of the others shares.
_TRAINER_MARKERS: Final = frozenset(
    {"model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "output_dir", "max_steps"}
)


def recognise(config: Mapping[str, Any] | str | os.PathLike[str]) -> str:
    """Which tool a configuration is for, by its keys: one of :data:`TOOLS`.

    ``config`` is a mapping, a ``.yaml`` or ``.json`` file, a folder, or a run record. Raises :class:`CostModelError`
    where no tool's keys are there.
    """
    if not isinstance(config, Mapping):
        path = os.fspath(config)
        if run_record.find_record(path) is not None:
            return "run record"
        if os.path.isdir(path):
            return "checkpoint"
        config = read_mapping(path)
    keys = set(config)
    if unread := _unread_tool(config):
        tool, framework = unread
        raise CostModelError(
            f"a configuration of {tool} is not read: give its values as flags or as a job file, with framework {framework} "
            f"(ftcost estimate -m MODEL --method qlora -b 2 --seq-len 2048 --framework {framework} ...)"
        )
    if wandb_config.is_wrapped(config):
        return "wandb"
    if "base_model" in keys or (len(keys & axolotl.MARKERS) >= 2 and not keys & {"model_name_or_path", "model"}):
        return "axolotl"
    if keys & _JOB_MARKERS or keys <= _JOB_KEYS:
        return "job"
    if keys & {"finetuning_type", "stage"} or len(keys & llamafactory.MARKERS) >= 2:
        return "llamafactory"
    if wandb_config.is_flat(config):
        return "wandb"
    if keys & (_TRAINER_MARKERS | trl.TRL_MARKERS) or len(keys & training_arguments.HARMLESS) >= 2:
        return "trl"
    if keys & _JOB_KEYS:
        return "job"  # misspelt: the job's own message names the nearest field
    nearest = {near for key in keys for near in difflib.get_close_matches(short(key), _JOB_KEYS, n=1, cutoff=0.8)}
    hint = f"nearest fields of a job: {', '.join(sorted(nearest))}; " if nearest else ""
    raise CostModelError(
        f"no known configuration has these keys: {', '.join(map(short, sorted(keys)[:8]))}; {hint}known are job files, "
        "Axolotl, LLaMA-Factory, TRL and TrainingArguments, W&B run configs, checkpoint folders and recorded runs"
    )


def _unread_tool(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """A tool whose file is known by its keys and not read, and the framework whose defaults are the nearest to its own.

    Some keys are those of tools that are read (AutoTrain's ``base_model``, litgpt's ``precision``), so that most of the file
    would be passed over.
    """
    if any(isinstance(value, Mapping) and "_component_" in value for value in config.values()):
        return "torchtune", "torchtune"
    if "checkpoint_dir" in config and isinstance(config.get("train"), Mapping):
        return "litgpt", "litgpt"
    if "task" in config and isinstance(config.get("params"), Mapping):
        return "AutoTrain", "trl"
    return None


def import_config(path: str | os.PathLike[str]) -> ImportedJob:
    """The job of a configuration file, checkpoint folder or run record of any tool of :data:`TOOLS`.

    Safe on files from strangers: YAML by the safe loader, at most 10 MB, no pickle, nothing is run. Raises
    :class:`CostModelError`.
    """
    where = os.fspath(path)
    if (record := run_record.find_record(where)) is not None:
        return run_record.read(record)
    if os.path.isdir(where):
        return checkpoint.read(where)
    return import_mapping(read_mapping(where), where)


def import_mapping(config: Mapping[str, Any], where: str = "the configuration") -> ImportedJob:
    """:func:`import_config` for a configuration that is loaded already. ``where`` is its name in messages."""
    tool = recognise(config)
    if tool == "axolotl":
        return axolotl.read(config, where)
    if tool == "llamafactory":
        return llamafactory.read(config, where)
    if tool == "wandb":
        return wandb_config.read(config, where)
    if tool == "trl":
        return trl.read(config, where)
    fields = dict(config)
    return ImportedJob(
        tool="job",
        tool_version="",
        where=where,
        read_fields=fields,
        origins={name: Origin("file", f"{name} in {where}") for name in fields},
        understood=tuple(fields),
        tied=ties_of_job(fields),
    )


def ties_of_job(fields: Mapping[str, Any]) -> dict[str, str]:
    """:attr:`ImportedJob.tied` of a job file."""
    is_of_gpu = fields.get("gpu") is not None and fields.get("usd_per_gpu_hour") is not None
    return {"usd_per_gpu_hour": "gpu"} if is_of_gpu else {}
