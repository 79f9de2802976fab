"""Every option of every command, as frozen dataclasses: one field is one flag, one TOML key and one line of `--help`.

A command's configuration is a dataclass whose fields are either options or sections (dataclasses of options). Flags
are flat: `--lr` is `optimizer.lr`, and a TOML file has it as `lr` under `[optimizer]`. `__post_init__` refuses values
that cannot work, by a `UsageError` that names the option; the command that opens the cache or the model refuses what
depends on those. Nothing heavy is imported here, so that `--help` is instant.
"""

from dataclasses import Field
from pathlib import Path
from typing import Any

from kdtrain.config.cache_commands import CacheTeacherConfig as CacheTeacherConfig
from kdtrain.config.cache_commands import check_device as check_device
from kdtrain.config.choices import Weights as Weights
from kdtrain.config.commands import ChatConfig as ChatConfig
from kdtrain.config.commands import DistillConfig as DistillConfig
from kdtrain.config.commands import EvaluateConfig as EvaluateConfig
from kdtrain.config.commands import ExportConfig as ExportConfig
from kdtrain.config.commands import GenerateConfig as GenerateConfig
from kdtrain.config.commands import InspectConfig as InspectConfig
from kdtrain.config.commands import VerifyConfig as VerifyConfig
from kdtrain.config.sections import CacheParallelConfig as CacheParallelConfig
from kdtrain.config.sections import CheckpointConfig as CheckpointConfig
from kdtrain.config.sections import CodecConfig as CodecConfig
from kdtrain.config.sections import DataConfig as DataConfig
from kdtrain.config.sections import GuardsConfig as GuardsConfig
from kdtrain.config.sections import LoraConfig as LoraConfig
from kdtrain.config.sections import MonitorConfig as MonitorConfig
from kdtrain.config.sections import ObjectiveConfig as ObjectiveConfig
from kdtrain.config.sections import OptimizerConfig as OptimizerConfig
from kdtrain.config.sections import ParallelConfig as ParallelConfig
from kdtrain.config.sections import PrecisionConfig as PrecisionConfig
from kdtrain.config.sections import QuantizationConfig as QuantizationConfig
from kdtrain.config.sections import StoppingConfig as StoppingConfig
from kdtrain.config.sections import TextConfig as TextConfig
from kdtrain.config.values import fields_of, marked, section_of


def sections(config: Any) -> dict[str, dict[str, Any]]:
    """The options of `config` by section, as plain values; options without a section are under "run"."""
    result: dict[str, dict[str, Any]] = {"run": {}}
    for section, each in fields_of(type(config)):
        owner = section_of(config, section)
        result.setdefault(section, {})[each.name] = written(each, getattr(owner, each.name))
    return result


def written(option: Field[Any], value: Any) -> Any:
    """The value of an option as files hold it: paths are text, tuples lists, and one of several values itself."""
    if option.metadata.get("several") and isinstance(value, tuple) and len(value) < 2:
        value = value[0] if value else None
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def shareable(config: Any) -> dict[str, dict[str, Any]]:
    """`sections` without private options, for what is written into a run and may be published with it.

    A command may hold a secret address, and repeating a run from its config.toml must not run a command by itself.
    """
    private = marked(type(config), "private")
    tables = sections(config).items()
    return {section: {name: table[name] for name in table if name not in private} for section, table in tables}
