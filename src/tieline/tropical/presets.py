"""Shapes of routed layers: what the advisor starts from."""

from dataclasses import dataclass

from tieline.errors import require

__all__ = ["PRESETS", "LayerShape"]


@dataclass(frozen=True)
class LayerShape:
    """One routed layer.

    Attributes:
        n_experts: routed experts N.
        k: experts chosen per token.
        width: hidden width H of an expert.
        hidden: width of the model, the router's input.
        shared: experts that every token uses besides; their width is H as well.
        matrices: weight matrices of an expert: 3 with a gate (SwiGLU), 2 without.
        n_groups: groups of experts, 1 where routing is not group-limited.
        k_groups: groups that a token may choose from.
    """

    n_experts: int
    k: int
    width: int
    hidden: int = 2048
    shared: int = 0
    matrices: int = 3
    n_groups: int = 1
    k_groups: int = 1

    def __post_init__(self) -> None:
        n, k = self.n_experts, self.k
        require(1 <= k < n, f"need 1 <= k < N: with k = N nothing is routed, got {k=}, N={n}")
        for name in ("width", "hidden", "matrices"):
            require(getattr(self, name) >= 1, f"need {name} >= 1, got {getattr(self, name)}")
        require(self.shared >= 0, f"need shared >= 0, got {self.shared}")
        groups = f"{self.k_groups} of {self.n_groups} groups"
        fits = 1 <= self.k_groups <= self.n_groups and n % self.n_groups == 0
        require(fits, f"need equal groups and 1 <= chosen <= all, got {groups} for {n} experts")

    def split(self, m: int) -> "LayerShape":
        """The paper's granularity transformation: N, H, k become mN, H/m, mk (sec. 5.1)."""
        require(
            m >= 1 and self.width % m == 0,
            f"a split must divide the expert width {self.width}, got {m}",
        )
        # a shared expert is split as well: its neurons run for every token either way
        return LayerShape(
            self.n_experts * m,
            self.k * m,
            self.width // m,
            self.hidden,
            self.shared * m,
            self.matrices,
            self.n_groups,
            self.k_groups,
        )


PRESETS: dict[str, LayerShape] = {
    "mixtral-8x7b": LayerShape(8, 2, 14336, 4096),
    "mixtral-8x22b": LayerShape(8, 2, 16384, 6144),
    "deepseek-v3": LayerShape(256, 8, 2048, 7168, shared=1, n_groups=8, k_groups=4),
    "olmoe": LayerShape(64, 8, 1024, 2048),
    "qwen3-30b-a3b": LayerShape(128, 8, 768, 2048),
    "qwen3-235b-a22b": LayerShape(128, 8, 1536, 4096),
    "gpt-oss-20b": LayerShape(32, 4, 2880, 2880),
    "gpt-oss-120b": LayerShape(128, 4, 2880, 2880),
}
"""Published shapes, as their configurations give them."""
