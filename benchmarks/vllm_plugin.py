"""What the vLLM plug-in costs: the smoothed model in the box against the plain one, on a CPU.

    python benchmarks/vllm_plugin.py [--rounds 12] [--json FILE]     (needs vLLM in its environment)

One process per server-to-be, one thread each: the model as it is, smoothed (ε = 0.2) with the 16
slots that the plug-in takes by default for 16 experts, and with 4. They generate in turns: 64
prompts of 12 tokens with 12 new tokens each (decoding), and 64 prompts of 60 tokens with one
(prefill). Ratios are of CPU time inside `generate`.
"""

import argparse
import json
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tieline
from harness import Samples, ratio, report
from tieline.engines.engine_registry import engine_named, environment_of, find_python
from tieline.models.demo import load_demo_model
from tieline.models.smoothed_model import smooth_

PROGRAM = """
import json, sys, time, torch
from tieline.serving.vllm_plugin import register
register()
from vllm import LLM, SamplingParams
torch.set_num_threads(1)
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=96,
          max_num_seqs=16, skip_tokenizer_init=True, enable_prefix_caching=False)
ids = torch.randint(3, 500, (64, 60), generator=torch.Generator().manual_seed(5)).tolist()
print("ready", file=sys.stderr)
for line in sys.stdin:
    length, new = json.loads(line)
    settings = SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
    rows = [{"prompt_token_ids": row[:length]} for row in ids]
    cpu, wall = time.process_time(), time.perf_counter()
    llm.generate(rows, settings, use_tqdm=False)
    times = [time.process_time() - cpu, time.perf_counter() - wall]
    print("TIMES", json.dumps(times), flush=True)
"""
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
LOADS = {"decoding": (12, 12), "prefill": (60, 1)}


class Server:
    """A process with one model that generates when it is asked."""

    def __init__(self, folder: Path, slots: int | None, stack: ExitStack) -> None:
        python = find_python(engine_named("vllm"))
        environment = environment_of(engine_named("vllm"), python) | SETTINGS
        environment["PYTHONPATH"] = str(Path(tieline.__file__).parents[1])
        if slots:
            environment["TIELINE_VLLM_SLOTS"] = str(slots)
        self.process: Any = subprocess.Popen(
            [str(python), "-c", PROGRAM, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stack.callback(self.process.wait)
        stack.callback(self.process.stdin.close)

    def seconds(self, load: tuple[int, int]) -> list[float]:
        """CPU and wall time of one generation."""
        self.process.stdin.write(json.dumps(load) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("TIMES "):
                return json.loads(line.removeprefix("TIMES "))
        raise RuntimeError("vLLM ended before it answered")


def main() -> None:
    """Run the benchmark and report it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        model: Any = load_demo_model().eval()
        model.save_pretrained(Path(temporary) / "plain")
        smooth_(model, 0.2)
        model.save_pretrained(Path(temporary) / "smoothed")
        kinds = {
            "plain": ("plain", None),
            "16 slots": ("smoothed", None),
            "4 slots": ("smoothed", 4),
        }
        servers = {
            name: Server(Path(temporary) / folder, slots, stack)
            for name, (folder, slots) in kinds.items()
        }
        samples = {(name, load): Samples([], []) for name in servers for load in LOADS}
        for turn in range(options.rounds + 2):
            for (name, load), sample in samples.items():
                cpu, wall = servers[name].seconds(LOADS[load])
                if turn >= 2:
                    sample.cpu.append(cpu)
                    sample.wall.append(wall)
    ratios = [
        ratio(f"{load}, {name} / plain", samples[name, load], samples["plain", load])
        for load in LOADS
        for name in kinds
        if name != "plain"
    ]
    report("vLLM plug-in", ratios, options.json)


if __name__ == "__main__":
    main()
