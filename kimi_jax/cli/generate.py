"""`kimi-jax generate`: continue one prompt."""

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.cli.bundled import find_checkpoint
from kimi_jax.cli.job import JobFlags, job_mesh, mesh_shape
from kimi_jax.cli.model_flags import ModelFlags
from kimi_jax.cli.output import CommandError, UsageError, emit, remark
from kimi_jax.config import ModelConfig
from kimi_jax.inference.arguments import token_array
from kimi_jax.inference.generate import check_prompts, generate
from kimi_jax.inference.sampling import Sampling
from kimi_jax.model.model import Model


@dataclass(frozen=True)
class Generate(ModelFlags):
    """Load a checkpoint and continue one prompt; new text (or ids) goes to standard output as it comes."""

    directory: tyro.conf.Positional[Path]
    """A Hugging Face checkpoint directory, or tiny-k3 or demo-k3 for a bundled one."""
    prompt: str | None = None
    """The prompt as text; needs tiktoken.model in the directory. Control tokens in it stay text."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as token ids, in place of --prompt."""
    max_new_tokens: int = 64
    """Bound on the new tokens."""
    temperature: float = 0.0
    """0 takes the most likely token; K3 is meant to run at 1."""
    top_k: int | None = None
    """Keep this many of the most likely tokens."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities sum to at least this (K3: 0.95)."""
    min_p: float | None = None
    """Keep tokens at least this many times as likely as the most likely one."""
    seed: int = 0
    """Randomness; the same seed gives the same tokens."""
    stop_ids: tuple[int, ...] | None = None
    """Ids that end the text; by default those of the configuration and generation configuration."""
    json: bool = False
    """Print one JSON object with ids, text, log-probabilities and the reason of the end instead."""
    job: Annotated[JobFlags, tyro.conf.arg(name="")] = field(default_factory=JobFlags)
    """Several processes that run this together."""

    def run(self) -> None:
        """Loads, generates, prints."""
        if (self.prompt is None) == (not self.prompt_ids):
            raise UsageError("give the prompt once: --prompt TEXT or --prompt-ids ID ID …")
        directory = find_checkpoint(self.directory)
        config = ModelConfig.from_file(directory)
        tokenizer = self._tokenizer(directory, config)
        prompt = list(self.prompt_ids) if self.prompt is None or tokenizer is None else tokenizer.encode(self.prompt)
        try:
            sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
            check_prompts(config, [prompt], self.max_new_tokens)
            token_array(config, list(self.stop_ids or ()), 1)
            shape = mesh_shape(self.mesh)
            job = self.job.start(config, {"prompt ids": prompt, **asdict(replace(self, prompt=None, job=JobFlags()))})
            mesh = job_mesh(job, shape)
        except ValueError as error:
            raise UsageError(str(error)) from None
        model = self.load(directory, mesh)
        self._generate(model, tokenizer, prompt, sampling)

    def _tokenizer(self, directory: Path, config: ModelConfig) -> Tokenizer | None:
        if (directory / "tiktoken.model").is_file():
            return Tokenizer.from_directory(directory, expected_vocab_size=config.vocab_size)
        if self.prompt is not None:
            raise UsageError(f"--prompt needs {directory / 'tiktoken.model'}; use --prompt-ids")
        return None

    def _generate(self, model: Model, tokenizer: Tokenizer | None, prompt: list[int], sampling: Sampling) -> None:
        remark(f"{len(prompt)} prompt tokens; the first steps compile")
        decoder = tokenizer.incremental_decoder() if tokenizer else None
        times: list[float] = []

        def on_token(_: int, token: int) -> None:
            times.append(time.perf_counter())
            if not self.json:
                emit(f"{token} " if decoder is None else decoder.push(token), end="")

        out = generate(model, [prompt], self.max_new_tokens, sampling, self.stop_ids, logprobs=True, on_token=on_token)
        if self.json:
            assert out.logprobs is not None
            text = None if tokenizer is None else tokenizer.decode(out[0])
            report = {
                "prompt_ids": prompt,
                "ids": out[0],
                "text": text,
                "logprobs": out.logprobs[0],
                "finish_reason": out.finish_reasons[0],
                "error": out.errors[0],
            }
            emit(json.dumps(report, ensure_ascii=False))
        else:
            emit("" if decoder is None else decoder.flush())
        if out.errors[0] is not None:
            raise CommandError(out.errors[0])
        if len(times) > 2:
            rate = (len(times) - 2) / (times[-1] - times[1])  # the first step compiles
            remark(f"{len(out[0])} tokens ({out.finish_reasons[0]}), {rate:.1f} tokens/s")
