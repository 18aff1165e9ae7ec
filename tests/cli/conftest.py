"""Running a command as its user does, in this process."""

import pytest

from kimi_jax.cli.main import main


@pytest.fixture
def run(capsys):
    """`run(*arguments)`: exit code, standard output, standard error."""

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code or 0
        return (code, *capsys.readouterr())

    return call
