"""The names of the library, each with its module: what type checkers read, and `__init__.py` where one is used."""

from kdtrain.cache.read.mixture import Mixture as Mixture
from kdtrain.cache.read.reader import collate as collate
from kdtrain.callback import AlphaCallback as AlphaCallback
from kdtrain.checkpoint.nested import CheckpointStore as CheckpointStore
from kdtrain.checkpoint.tiers import Keep as Keep
from kdtrain.cli import register_command as register_command
from kdtrain.commands.distill import distill as distill
from kdtrain.config.commands import CacheTeacherConfig as CacheTeacherConfig
from kdtrain.config.commands import DistillConfig as DistillConfig
from kdtrain.data.corpus import register_text as register_text
from kdtrain.errors import RunError as RunError
from kdtrain.errors import UsageError as UsageError
from kdtrain.library import Cache as Cache
from kdtrain.library import CacheWriter as CacheWriter
from kdtrain.library import cache_teacher as cache_teacher
from kdtrain.models.output_head import Head as Head
from kdtrain.monitor.loggers import Logger as Logger
from kdtrain.monitor.loggers import register_logger as register_logger
from kdtrain.monitor.record import RunRecord as RunRecord
from kdtrain.objective.divergence import register_divergence as register_divergence
from kdtrain.objective.loss import DistillationLoss as DistillationLoss
from kdtrain.objective.loss import LossOutput as LossOutput
from kdtrain.objective.loss import distillation_loss as distillation_loss
from kdtrain.objective.tails import register_tail as register_tail
from kdtrain.objective.targets import DenseTargets as DenseTargets
from kdtrain.objective.temperature import AdversarialTemperature as AdversarialTemperature
from kdtrain.objective.temperature import LikelihoodTemperature as LikelihoodTemperature
from kdtrain.objective.temperature import MinimizedTemperature as MinimizedTemperature
from kdtrain.objective.temperature import ScheduledTemperature as ScheduledTemperature
from kdtrain.objective.temperature import Temperature as Temperature
from kdtrain.objective.temperature import register_temperature as register_temperature
from kdtrain.precision.backends import quantize_ as quantize_
from kdtrain.precision.backends import register_backend as register_backend
from kdtrain.precision.controller import Policy as Policy
from kdtrain.precision.controller import PrecisionController as PrecisionController
from kdtrain.teaching.teacher import OnlineTeacher as Teacher  # noqa: F401
from kdtrain.teaching.teacher import register_teacher as register_teacher
from kdtrain.tokenizers.alignment import Alignment as Alignment
from kdtrain.training.optimizers import register_optimizer as register_optimizer
from kdtrain.training.sources.source import Facts as Facts
from kdtrain.training.sources.source import SourceRequest as SourceRequest
from kdtrain.training.sources.source import register_source as register_source
from kdtrain.training.student import Student as Student
from kdtrain.training.validate import evaluation_metrics as evaluation_metrics

__version__: str
