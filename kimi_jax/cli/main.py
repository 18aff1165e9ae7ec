"""Entry point of `kimi-jax`. Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from kimi_jax import __version__
from kimi_jax.chat.tokenizer import TokenizerError
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.cli.bench import Bench, Warmup
from kimi_jax.cli.chat import Chat
from kimi_jax.cli.compilation_cache import use_compilation_cache
from kimi_jax.cli.compile import Compile
from kimi_jax.cli.convert import Convert, Export, Verify
from kimi_jax.cli.demo import Demo
from kimi_jax.cli.finetune import Finetune
from kimi_jax.cli.generate import Generate
from kimi_jax.cli.inspect import Inspect
from kimi_jax.cli.merge import Merge
from kimi_jax.cli.output import CommandError, UsageError, complain, only_first_prints
from kimi_jax.cli.plan import Plan
from kimi_jax.cli.quantize import Quantize
from kimi_jax.cli.synthesize import Synthesize
from kimi_jax.cli.tokens import Tokens
from kimi_jax.cli.train import Train
from kimi_jax.config import ConfigError
from kimi_jax.finetune.data.errors import DataError
from kimi_jax.finetune.run_directory import RunError
from kimi_jax.parallel.distributed import fail, finish, is_joined
from kimi_jax.parallel.launch_environment import DistributedError
from kimi_jax.parallel.mesh import MeshError

Command = (
    Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Tokens, tyro.conf.subcommand("tokens")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Synthesize, tyro.conf.subcommand("synthesize")]
    | Annotated[Quantize, tyro.conf.subcommand("quantize")]
    | Annotated[Finetune, tyro.conf.subcommand("finetune")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Merge, tyro.conf.subcommand("merge")]
    | Annotated[Compile, tyro.conf.subcommand("compile")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Warmup, tyro.conf.subcommand("warmup")]
)

FAILURES = (
    CommandError,
    ConfigError,
    CheckpointError,
    DataError,
    DistributedError,
    MeshError,
    RunError,
    TokenizerError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; wrong options end with `SystemExit(2)`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(__version__)
        return 0
    command = tyro.cli(
        Command,
        prog="kimi-jax",
        description="Kimi K3, K3.1 Pro and Kimi-Linear in JAX.",
        args=list(arguments) or ["--help"],
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    if not isinstance(command, Compile):  # which measures the compiler
        use_compilation_cache()
    try:
        command.run()
        finish()
        return 0
    except UsageError as error:
        ended: tuple[BaseException, int] = error, complain(str(error), 2)
    except (*FAILURES, OSError) as error:
        ended = error, complain(str(error), 1)
    except KeyboardInterrupt as error:
        ended = error, complain("interrupted", 130)
    finally:
        only_first_prints(None)
    if is_joined():
        fail(*ended)
    return ended[1]


if __name__ == "__main__":
    sys.exit(main())
