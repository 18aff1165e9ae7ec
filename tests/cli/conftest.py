"""Running a command as its user does, in this process."""

import base64

import pytest

from kimi_jax.cli.main import main


@pytest.fixture
def vocabulary(tmp_path):
    """A directory with `tiktoken.model`: 256 bytes, and so 256 special tokens, the tiny models' 512 ids."""
    lines = (f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    return tmp_path


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
