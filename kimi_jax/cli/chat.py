"""`kimi-jax chat`: talk with a model on a terminal."""

import io
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from kimi_jax.chat.parser import CallArguments, CallStart, Delta, ReasoningDelta
from kimi_jax.chat.render import ChatError, thinks
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.chat.tools import load_tool
from kimi_jax.cli.bundled import find_checkpoint
from kimi_jax.cli.job import JobFlags, job_mesh, mesh_shape
from kimi_jax.cli.model_flags import ModelFlags
from kimi_jax.cli.output import UsageError, console, remark
from kimi_jax.cli.talk import STOPPED, Reply, Talk
from kimi_jax.config import ModelConfig
from kimi_jax.inference.conversation import ContextFullError, Conversation
from kimi_jax.inference.sampling import Sampling

HELP = """\
/retry        answer the last message again, with another seed
/save FILE    write the conversation to a JSON file
/load FILE    go on with a conversation that was written
/help         this
/quit         leave; so does Ctrl-D
Ctrl-C stops an answer. A line that ends with a space and \\ goes on with the next."""

# What a terminal would take for commands: control characters but tab and newline. What it cannot show: surrogates.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Chat(ModelFlags):
    """Load a checkpoint and talk with the model: its answer comes as it is written, the cache is kept from turn to
    turn, and only what is new is prefilled."""

    directory: tyro.conf.Positional[Path]
    """A Hugging Face checkpoint directory with tiktoken.model, or what kimi-jax convert made of one."""
    effort: str = "max"
    """How much the model is asked to think: low, high or max."""
    instruct: bool = False
    """No thinking at all, and no thinking channel."""
    thinking: Literal["dimmed", "hidden"] = "dimmed"
    """Whether its thinking is shown."""
    system: str | None = None
    """A system message."""
    tool: tuple[str, ...] = ()
    """Python functions that the model may call, as FILE.py:FUNCTION; each call is asked for first."""
    context: int | None = None
    """Tokens that the conversation may have; the cache is made for so many. By default 8,192, or all the model has."""
    max_new_tokens: int | None = None
    """Bound on the tokens of an answer, thinking included; by default what the context has room for."""
    temperature: float = 1.0
    """0 takes the most likely token; K3 is meant to run at 1."""
    top_p: float | None = 0.95
    """Keep the fewest tokens whose probabilities sum to at least this."""
    seed: int = 0
    """Randomness; the same seed and words give the same answers."""

    def run(self) -> None:
        """Loads, then reads lines from standard input until it ends."""
        directory = find_checkpoint(self.directory)
        config = ModelConfig.from_file(directory)
        if not (directory / "tiktoken.model").is_file():
            raise UsageError(f"chat needs {directory / 'tiktoken.model'}")
        if JobFlags().find() is not None:
            raise UsageError("chat is for one process; a job of several has no terminal")
        context = min(8192, config.max_positions) if self.context is None else self.context
        if not 1 <= context <= config.max_positions:
            raise UsageError(f"--context must lie between 1 and the model's {config.max_positions} positions")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be at least 1, found {self.max_new_tokens}")
        try:
            thinking = thinks(not self.instruct, self.effort)
            tools = [load_tool(source) for source in self.tool]
            sampling = Sampling(self.temperature, top_p=self.top_p, seed=self.seed)
        except ValueError as error:  # of effort, tools or sampling
            raise UsageError(str(error)) from None
        if len({tool.name for tool in tools}) < len(tools):
            raise UsageError("two tools have the same name")
        tokenizer = Tokenizer.from_directory(directory, expected_vocab_size=config.vocab_size)
        mesh = job_mesh(None, mesh_shape(self.mesh))
        model = self.load(directory, mesh)
        talk = Talk(
            Conversation(model, context, sampling),
            tokenizer,
            thinking=thinking,
            effort=self.effort,
            system=self.system,
            tools=tools,
            sampling=sampling,
            max_new_tokens=self.max_new_tokens,
        )
        remark("The first answer compiles. /help lists what else can be said.")
        for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=errors)
        with suppress(ImportError):
            import readline  # noqa: F401 (input() then has a history and can be edited)
        Screen(talk, console(), hidden=self.thinking == "hidden").listen(_read_line)


class Screen:
    """Shows a `Talk` on a console and takes its lines."""

    def __init__(self, talk: Talk, out: Console, hidden: bool) -> None:
        self.talk, self.out, self.hidden = talk, out, hidden

    def listen(self, read: Callable[[str], str]) -> None:
        """Takes lines from `read`, which is given what to ask, until it raises `EOFError`."""
        while True:
            try:
                line = read("> ")
                while line.endswith(" \\"):
                    line = line[:-1] + "\n" + read("  ")
            except EOFError:
                return
            except KeyboardInterrupt:
                remark("\nCtrl-D or /quit leaves.")
                continue
            if line.strip() == "/quit":
                return
            try:
                self._take(line, read)
            except KeyboardInterrupt:
                remark("\ninterrupted")

    def _take(self, line: str, read: Callable[[str], str]) -> None:
        command, _, rest = line.strip().partition(" ")
        if command in ("/save", "/load"):
            self._file(command, rest.strip())
        elif rest or not command.startswith("/"):
            if line.strip():
                self.talk.say(line)
                self._answer(read)
        elif command == "/help":
            remark(HELP)
        elif command == "/retry":
            if self.talk.take_back():
                self._answer(read)
            else:
                remark("there is nothing to answer yet")
        else:
            remark(f"there is no {command}; /help lists what there is")

    def _file(self, command: str, name: str) -> None:
        if not name:
            remark(f"{command} wants a file")
            return
        try:
            if command == "/save":
                self.talk.save(Path(name).expanduser())
                remark(f"wrote {len(self.talk.messages)} messages to {name}")
            else:
                others = self.talk.load(Path(name).expanduser())
                remark(f"read {len(self.talk.messages)} messages from {name}")
                if others:
                    remark(f"its {' and '.join(others)} are others than this chat's, which stay")
        except (OSError, ValueError) as error:
            remark(f"{command}: {error}")

    def _answer(self, read: Callable[[str], str]) -> None:
        """One answer, and those that follow on calls of tools."""
        while True:
            show = _Shown(self.out, self.hidden)
            try:
                reply = self.talk.reply(show)
            except (ChatError, ContextFullError) as error:
                self.talk.take_back_all()
                remark(f"no answer: {error}; your last message was taken back")
                return
            finally:
                show.end()
            remark(_summary(reply, self.talk.conversation.room))
            calls = self.talk.pending()
            going_on = [self._call(call, read) for call in calls]
            if not calls or not all(going_on):
                return

    def _call(self, call: dict[str, Any], read: Callable[[str], str]) -> bool:
        """Makes a call where the user says so; False where the user would rather say something else."""
        function, asked, going_on = call["function"], "", True
        if function["name"] in self.talk.tools:
            _forget_typed()
            try:
                asked = read(_in_one_line(f"call {function['name']}({function['arguments']})?") + " [y/N] ")
            except (EOFError, KeyboardInterrupt):
                going_on = False
        result = self.talk.use_tool(call, asked.strip().lower() in ("y", "yes"))
        _write(self.out, result + "\n", "dim")
        return going_on and result != STOPPED


class _Shown:
    """Prints the deltas of an answer as they come."""

    def __init__(self, out: Console, hidden: bool) -> None:
        self.out, self.hidden = out, hidden
        self.part: type | None = None

    def __call__(self, delta: Delta) -> None:
        """Prints one delta."""
        if isinstance(delta, CallStart):
            self._begin(CallStart)
            self._print(f"[{delta.name}] ", "bold")
            self.part = CallArguments
            return
        if type(delta) is not self.part:
            self._begin(type(delta))
            if self.hidden and isinstance(delta, ReasoningDelta):
                self._print("thinking …", "dim")
        if not (self.hidden and isinstance(delta, ReasoningDelta)):
            self._print(delta.text, "dim" if isinstance(delta, ReasoningDelta | CallArguments) else None)

    def end(self) -> None:
        """Ends the line."""
        self._begin(type(None))

    def _begin(self, part: type) -> None:
        if self.part is not None:
            _write(self.out, "\n", None)
        self.part = part

    def _print(self, text: str, style: str | None) -> None:
        _write(self.out, text, style)


def _write(out: Console, text: str, style: str | None) -> None:
    """Writes text as it is, at once: nothing wrapped, no tab expanded, no name of an emoji or style read out of it."""
    out.print(Segments([Segment(_harmless(text), Style.parse(style or ""))]), end="", soft_wrap=True)
    out.file.flush()


def _harmless(text: str) -> str:
    """The text with control characters made visible, so that none can command the terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _in_one_line(text: str) -> str:
    """The text with everything escaped that would not be seen as it is: a question must not be forged."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _summary(reply: Reply, room: int) -> str:
    rate = "" if reply.rate is None else f", {reply.rate:.1f} tokens/s"
    cut = f"; {reply.cut_calls} tool calls were cut off and are not made" if reply.cut_calls else ""
    return (
        f"[{reply.tokens} tokens{rate}; {reply.prefilled} of the prompt were new, {reply.prefill_seconds:.1f} s; "
        f"context {reply.context:,} of {room:,}{reply.end and '; stopped: ' + reply.end}{cut}]"
    )


def _forget_typed() -> None:
    """Drops what was typed while an answer came: it was no answer to the question that follows."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import termios

            termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _read_line(ask: str) -> str:
    """A line of standard input; what is asked is shown on a terminal only."""
    if sys.stdin.isatty():
        return input(ask)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
