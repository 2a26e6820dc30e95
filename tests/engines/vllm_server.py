"""Start a real vLLM server on a CPU that returns routes: python vllm_server.py MODEL PORT

With PLANTED_DEPENDENCE=1 the third layer adds to the score of expert 0 in passes of more than 40
tokens. Runs in vLLM's own Python. Routes need its second model runner, which needs Triton; on a CPU
that starts only with interpreted kernels and a stand-in for the backend.
"""

import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"
from triton import backends  # reads the variable


class Driver:
    """A backend that is there."""

    @staticmethod
    def is_active():
        return True


backends.backends["cpu"] = backends.Backend(None, Driver)  # also in the engine's own process

if os.environ.get("PLANTED_DEPENDENCE"):
    from vllm.model_executor.models.olmoe import OlmoeMoE

    build = OlmoeMoE.__init__

    def build_named(self, *args, prefix="", **options):
        build(self, *args, prefix=prefix, **options)
        self.planted = ".2." in prefix

    def forward(self, hidden_states):
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        logits, _ = self.gate(tokens)
        if self.planted and len(tokens) > 40:
            logits[:, 0] += 0.5
        output = self.experts(hidden_states=tokens, router_logits=logits)
        return output.view(hidden_states.shape)

    OlmoeMoE.__init__, OlmoeMoE.forward = build_named, forward

if __name__ == "__main__":
    model, port = sys.argv[1:3]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    options += ["--enable-return-routed-experts", "--enable-scale-out", "--max-num-seqs", "16"]
    address = ["--host", "127.0.0.1", "--port", port]
    sys.argv = ["api_server", "--model", model, *address, *options]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
