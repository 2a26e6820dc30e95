"""What it costs to capture a model's routing: time of a forward pass, and memory of a long run.

    python benchmarks/capture.py [--rounds 20] [--json FILE]

Time: 4 layers, d = 512, 64 experts of width 256, top-8, 4096 tokens; plain passes, passes whose
records a sink drops and passes that feed the streaming summary take turns. Target: at most 5 %.
The same cost is also timed from inside, as the share of a pass that the recorder takes.
Memory: a million tokens through 16 small layers of 64 experts; target: 300 MB above the model.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from harness import Ratio, Samples, interleave, peak_growth, peak_memory, ratio, report
from tieline.models import capture
from tieline.models.capture import DEFAULT_EPSILONS, Recorder
from tieline.trace.summary import SummaryBuilder

TIME_TARGET = 1.05
MEMORY_TARGET = 300e6
MILLION = 1 << 20


class Nowhere:
    """A sink that keeps nothing."""

    def update(self, *record: object) -> None:
        """Drop the record."""


def olmoe(layers: int, width: int, expert_width: int) -> OlmoeForCausalLM:
    """A random model of 64 experts, top-8, in float32."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=expert_width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_experts=64,
        num_experts_per_tok=8,
        pad_token_id=0,
        eos_token_id=1,
    )
    return OlmoeForCausalLM(config).eval()


def timings(rounds: int, tokens: int) -> list[Ratio]:
    """Forward passes with capture against those of a twin model without, in turns."""
    model = olmoe(layers=4, width=512, expert_width=256)
    ids = torch.randint(1, 512, (tokens // 512, 512))
    sinks = {"capture": Nowhere(), "capture and summary": SummaryBuilder(DEFAULT_EPSILONS)}
    runs: dict[str, Callable[[], object]] = {"plain": lambda: model(input_ids=ids)}
    inside: dict[str, Inside] = {}
    with torch.inference_mode(), ExitStack() as stack:
        for name, sink in sinks.items():
            copy = twin(model)
            inside[name] = Inside(stack.enter_context(capture(copy, sink=sink)))
            runs[name] = inside[name].timed(partial(copy, input_ids=ids))
        samples = interleave(runs, rounds)
    ratios = []
    for name, target in (("capture", None), ("capture and summary", TIME_TARGET)):
        ours, rest = samples[name], inside[name].rest(samples[name])
        for clock in ("cpu", "wall"):
            ratios.append(ratio(f"{name} / plain", ours, samples["plain"], target, clock))
        ratios.append(ratio(f"{name} / the rest of the pass", ours, rest, target))
    return ratios


class Inside:
    """CPU time that a recorder takes in each pass, which noise of the model does not blur."""

    def __init__(self, recorder: Recorder) -> None:
        """Time the three methods that a pass calls."""
        self.passes: list[float] = []
        for method in ("begin", "observe", "finish"):
            setattr(recorder, method, self._timed(getattr(recorder, method)))

    def timed(self, run: Callable[[], object]) -> Callable[[], object]:
        """The same run, as a pass of its own."""

        def timed_pass() -> object:
            self.passes.append(0.0)
            return run()

        return timed_pass

    def rest(self, samples: Samples) -> Samples:
        """The timed passes without what the recorder took."""
        taken = self.passes[-len(samples.cpu) :]
        return Samples([a - b for a, b in zip(samples.cpu, taken, strict=True)], [])

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            start = time.process_time()
            method(*arguments)
            self.passes[-1] += time.process_time() - start

        return timed


def twin(model: OlmoeForCausalLM) -> OlmoeForCausalLM:
    """A model of its own over the same tensors."""
    return deepcopy(model, {id(x): x for x in [*model.parameters(), *model.buffers()]})


def long_run(tokens: int) -> None:
    """Print the growth of the peak over the memory of a model that has run before."""
    model = olmoe(layers=16, width=32, expert_width=8)
    ids = torch.randint(1, 512, (8, 512))

    def run() -> None:
        builder = SummaryBuilder(DEFAULT_EPSILONS)
        with torch.inference_mode(), capture(model, sink=builder) as recorder:
            while recorder.n_tokens < tokens:
                model(input_ids=ids)
        builder.summary()

    with torch.inference_mode():
        model(input_ids=ids)
    print(peak_growth(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--long-run", type=int, default=None, help="child: tokens to run")
    parser.add_argument("--memory-tokens", type=int, default=MILLION, help="0 skips the long run")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    if options.long_run is not None:
        long_run(options.long_run)
        return
    ratios = timings(options.rounds, options.tokens)
    memory = {}
    if options.memory_tokens:
        grown = peak_memory(__file__, "--long-run", str(options.memory_tokens))
        memory = {"tokens": options.memory_tokens, "bytes": grown, "target": MEMORY_TARGET}
        print(f"memory of {options.memory_tokens} tokens: {grown / 1e6:.0f} MB (target 300 MB)")
    report("capture", ratios, options.json, memory=memory)


if __name__ == "__main__":
    main()
