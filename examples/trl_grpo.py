"""GRPO of TRL on the model in the box: routes are recorded, replayed in the update and compared.

python examples/trl_grpo.py [steps]

Needs `pip install trl`. Three lines are Tieline's: the import, the class, and its name in the call.
"""

import argparse
import sys
import tempfile
from typing import Any

from tieline.analysis.trainer_callbacks import RolloutReplay
from tieline.models.demo import load_demo_model, load_demo_tokenizer

try:
    import datasets  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    sys.exit(f"{missing}: pip install trl")


class Trainer(RolloutReplay, trl.GRPOTrainer):
    """GRPO that records, replays and compares routes."""


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("steps", type=int, nargs="?", default=3, help="of training")
steps = parser.parse_args().steps
tokenizer = load_demo_tokenizer()
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
prompts = ["def f(x):", "import os", "class A:\n    pass", "for i in range(10):"]
build: Any = Trainer
with tempfile.TemporaryDirectory() as folder:
    trainer = build(
        model=load_demo_model(),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=trl.GRPOConfig(
            folder,
            max_steps=steps,
            logging_steps=1,
            per_device_train_batch_size=8,
            num_generations=2,
            max_completion_length=16,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts * 4}),
        processing_class=tokenizer,
    )
    trainer.train()
for log in trainer.state.log_history:
    if "rollout/tokens" in log:
        print(
            f"step {log['step']}: {log['rollout/tokens']:.0f} tokens, "
            f"{log['rollout/flip_rate']:.2%} flip, {log['rollout/unexplained']:.2%} unexplained, "
            f"{log['rollout/unrecorded']:.2%} without a record"
        )
