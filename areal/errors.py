"""Every error that areal raises on purpose.

    ArealError
    ├── ConfigError          a setting, a data row or an option that cannot be honoured; nothing has started
    │   └── DataError        a task file or data set (names the file and the line)
    ├── EpisodeError         one episode failed; it is retried, then dropped and counted (I9)
    │   ├── DeadlineExceeded the episode or one of its calls timed out
    │   ├── ContextOverflow  the prompt leaves no room for an answer in the model's context
    │   ├── RewardError      the reward could not be computed, or is not a finite number
    │   └── ForkRefused      an edit of earlier messages that the transcript cannot represent
    ├── ServerError          an SGLang server failed (names the server)
    │   ├── ServerLost       no connection, or it died; another server takes over
    │   └── ServerRefused    it answered with an error or with garbage
    ├── TrainerError         a trainer rank failed or refused a request (names the rank)
    │   └── VersionConflict  a training request for a version that the rank is not at (I4)
    ├── PublishError         new weights did not reach the servers
    ├── ProcessError         a child process did not start, or died (has the last lines of its log)
    ├── LedgerError          the ledger cannot be written or read
    ├── TooManyFailures      more episodes failed than `failures` allows (has the last traceback)
    ├── Stopped              `areal stop` or `Controller.stop` ended the run
    └── Stalled              no progress for `watchdog_s`; names what the run was waiting for (I7)

Messages name the value, the place and the remedy.
"""


class ArealError(Exception):
    """The root: `except ArealError` catches everything that areal raises on purpose, and nothing else."""


class ConfigError(ArealError):
    """A setting that cannot be honoured. Raised before anything starts."""


class DataError(ConfigError):
    """A task that cannot be read. Names the file and the line."""


class EpisodeError(ArealError):
    """One episode failed."""


class DeadlineExceeded(EpisodeError):
    """An episode, a model call or a tool call timed out."""


class ContextOverflow(EpisodeError):
    """The prompt leaves no room for an answer within the model's context."""


class RewardError(EpisodeError):
    """The reward of an episode could not be computed. Raise it in an agent whose reward function failed."""


class ForkRefused(EpisodeError):
    """The messages cannot be turned into tokens."""


class ServerError(ArealError):
    """An SGLang server failed."""


class ServerLost(ServerError):
    """The server is unreachable or died during a request."""


class ServerRefused(ServerError):
    """The server answered with an error status or a malformed response."""


class TrainerError(ArealError):
    """A trainer rank failed or refused a request."""


class VersionConflict(TrainerError):
    """A training request named a version, life or batch that the rank is not at (I4)."""


class PublishError(ArealError):
    """New weights did not reach the servers."""


class ProcessError(ArealError):
    """A child process did not start or died. Once it ran, the message ends with the last lines of its log."""


class LedgerError(ArealError):
    """The ledger cannot be written or read."""


class TooManyFailures(ArealError):
    """More consecutive episodes failed than `failures` allows for this kind of failure."""


class Stopped(ArealError):
    """The run was told to stop (`areal stop`, `Controller.stop`)."""


class Stalled(ArealError):
    """No progress for `watchdog_s` seconds."""


def root_cause(error: BaseException) -> BaseException:
    """The error of an ExceptionGroup to show to the user: the first ArealError, or else the first error."""
    while isinstance(error, BaseExceptionGroup):
        parts = [root_cause(part) for part in error.exceptions]
        error = next((part for part in parts if isinstance(part, ArealError)), parts[0])
    return error
