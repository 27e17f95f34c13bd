"""Models of other libraries than transformers and timm, those of them that are installed.

    pip install --no-deps vit-pytorch x-transformers ...   (LIBRARIES names them; without torch, which is there)
    python -m benchmarks.coverage --suite libraries

Each is the library's own class, small, in training mode, called as its documentation says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .coverage_library import Make, features, library_case, module, words
from .coverage_truth import Case
from .coverage_vision import LIBRARIES as VISION

# ---------------------------------------------------------------------- text and sequences


def x_transformers() -> Iterator[Case]:
    x = module("x_transformers")
    options: dict[str, dict[str, Any]] = {
        "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True},
        "relative": {"rel_pos_bias": True}, "dynamic positions": {"dynamic_pos_bias": True},
        "glu": {"ff_glu": True, "ff_swish": True}, "rmsnorm": {"use_rmsnorm": True},
        "memory keys": {"attn_num_mem_kv": 2}, "top-k": {"attn_sparse_topk": 2}, "residual attention":
        {"residual_attn": True}, "scalenorm": {"use_scalenorm": True}, "gated values": {"attn_gate_values": True},
        "shifted": {"shift_tokens": 1}, "sandwich": {"sandwich_norm": True}, "qk norm": {"attn_qk_norm": True},
        "one kv head": {"attn_kv_heads": 1}, "macaron": {"macaron": True}, "hyper": {"num_residual_streams": 2},
        "laser": {"attn_laser": True}, "post norm": {"pre_norm": False}, "polar": {"polar_pos_emb": True},
        "cope": {"attn_use_cope": True}, "value residual": {"add_value_residual": True}, "flash": {"attn_flash": True},
        "dynamic tanh": {"use_dynamic_tanh": True}, "sigmoid": {"attn_sigmoid": True}, "head scale":
        {"attn_head_scale": True}, "on attention": {"attn_on_attn": True}, "selective": {"attn_selective": True},
    }  # fmt: skip

    def wrapped(layers: str = "Decoder", more: dict[str, Any] | None = None, **given: Any) -> Make:
        kind = getattr(x, layers)
        return lambda: x.TransformerWrapper(
            num_tokens=23, max_seq_len=16, attn_layers=kind(dim=16, depth=2, heads=2, attn_dim_head=8, **(more or {})),
            **given,
        )  # fmt: skip

    for name, more in options.items():
        yield library_case(f"x_transformers {name}", wrapped(more=more), words())
    yield library_case("x_transformers tied", wrapped("Encoder", tie_embedding=True), words())
    yield library_case("x_transformers memory tokens", wrapped("Encoder", num_memory_tokens=3), words())
    mixture = wrapped(mixture_of_softmax=True, mixture_of_softmax_k=2)
    yield library_case("x_transformers mixture of softmax", mixture, words())


def sequences() -> Iterator[Case]:
    yield library_case(
        "linformer", lambda: module("linformer").LinformerLM(num_tokens=23, dim=16, seq_len=8, depth=2, heads=2, k=4),
        words(8),
    )  # fmt: skip
    yield library_case(
        "performer_pytorch", lambda: module("performer_pytorch").PerformerLM(
            num_tokens=23, max_seq_len=8, dim=16, depth=2, heads=2, dim_head=8, nb_features=8,
            feature_redraw_interval=None), words(8),
    )  # fmt: skip
    yield library_case(
        "reformer_pytorch", lambda: module("reformer_pytorch").ReformerLM(
            num_tokens=23, dim=16, depth=1, max_seq_len=16, heads=2, bucket_size=4, n_hashes=1, causal=True,
            full_attn_thres=32), words(16),
    )  # fmt: skip
    for parallel in (True, False):
        yield library_case(
            f"mambapy {'parallel' if parallel else 'sequential'} scan",
            lambda parallel=parallel: module("mambapy.mamba").Mamba(
                module("mambapy.mamba").MambaConfig(d_model=16, n_layers=2, pscan=parallel)), features(8, 16),
        )  # fmt: skip
    yield library_case("xlstm", xlstm, features(8, 16))
    quantised = lambda: nn.Sequential(nn.Linear(8, 3), module("vector_quantize_pytorch").FSQ([8, 5, 5]))
    yield library_case("vector_quantize_pytorch FSQ", quantised, features(6, 8))


def xlstm() -> nn.Module:
    x = module("xlstm")
    long = x.mLSTMBlockConfig(mlstm=x.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2))
    short = x.sLSTMBlockConfig(
        slstm=x.sLSTMLayerConfig(backend="vanilla", num_heads=2, conv1d_kernel_size=4),
        feedforward=x.FeedForwardConfig(proj_factor=1.3, act_fn="gelu"),
    )
    stack = x.xLSTMBlockStackConfig(
        mlstm_block=long, slstm_block=short, context_length=8, num_blocks=2, embedding_dim=16, slstm_at=[1]
    )
    return x.xLSTMBlockStack(stack)


# ---------------------------------------------------------------------- tables, flows, equations


def tables() -> Iterator[Case]:
    mixed = lambda s: {"x": torch.randn(s.batch, 4), "c": torch.randint(0, 3, (s.batch, 2))}
    yield library_case(
        "rtdl FTTransformer", lambda: module("rtdl_revisiting_models").FTTransformer(
            n_cont_features=4, cat_cardinalities=[3, 5], d_out=2, n_blocks=2, d_block=16, attention_n_heads=2,
            attention_dropout=0.0, ffn_d_hidden=None, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0,
            residual_dropout=0.0), mixed,
    )  # fmt: skip
    for kind, more in (("PeriodicEmbeddings", {"lite": True}), ("LinearReLUEmbeddings", {})):
        yield library_case(
            f"rtdl {kind}", lambda kind=kind, more=more: nn.Sequential(
                getattr(module("rtdl_num_embeddings"), kind)(4, 8, **more), nn.Flatten(), nn.Linear(32, 3)),
            features(4),
        )  # fmt: skip
    tabnet = lambda: module("pytorch_tabnet.tab_network").TabNet(4, 2, group_attention_matrix=torch.eye(4))
    yield library_case("pytorch_tabnet TabNet", tabnet, features(4))


def flows() -> Iterator[Case]:
    likelihood = lambda m, b: m.log_prob(b["x"]).unsqueeze(1)
    for kind in ("MaskedAutoregressiveFlow", "SimpleRealNVP"):
        yield library_case(
            f"nflows {kind}", lambda kind=kind: getattr(module("nflows.flows"), kind)(
                features=4, hidden_features=8, num_layers=2, num_blocks_per_layer=1), features(4), likelihood,
        )  # fmt: skip

    class Equation(nn.Module):
        def __init__(self, solve: str, method: str) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            self.head, self.solve, self.method = nn.Linear(4, 3), getattr(module("torchdiffeq"), solve), method

        def forward(self, x: Tensor) -> Tensor:
            class Field(nn.Module):
                def forward(_, t: Tensor, y: Tensor) -> Tensor:
                    return self.field(y)

            steps = {"options": {"step_size": 0.25}} if self.method == "rk4" else {}
            times = torch.tensor([0.0, 1.0], dtype=x.dtype)
            more = {"adjoint_params": tuple(self.field.parameters())} if "adjoint" in self.solve.__name__ else {}
            return self.head(self.solve(Field(), x, times, method=self.method, **steps, **more)[-1])

    for solve, method in (("odeint", "rk4"), ("odeint", "dopri5"), ("odeint_adjoint", "rk4")):
        yield library_case(f"torchdiffeq {solve} {method}", lambda s=solve, m=method: Equation(s, m), features(4))


# ---------------------------------------------------------------------- graphs

EDGES = torch.tensor([[0, 1, 1, 2, 3, 0], [1, 0, 2, 1, 0, 3]])  # of every graph of 4 nodes


def graphs() -> Iterator[Case]:
    layers = module("torch_geometric.nn")

    class Graphs(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.first, self.second = getattr(layers, kind)(5, 8), getattr(layers, kind)(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, nodes: Tensor, edges: Tensor, graph_of: Tensor, number: int) -> Tensor:
            hidden = self.second(self.first(nodes, edges).relu(), edges)
            return self.head(layers.global_mean_pool(hidden, graph_of, number))

    def packed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        import fastdp

        number = len(batch["x"])
        nodes, graph_of = batch["x"].flatten(0, 1), torch.arange(number).repeat_interleave(4)
        edges = torch.cat([EDGES + 4 * i for i in range(number)], 1)
        fastdp.mark_rows(nodes, graph_of, samples=number)
        fastdp.mark_rows(graph_of, graph_of, samples=number)
        return model(nodes, fastdp.mark_rows(edges, None), graph_of, number)

    for kind in ("GCNConv", "GATConv", "SAGEConv", "TransformerConv", "GATv2Conv", "GraphConv", "ARMAConv"):
        yield library_case(f"torch_geometric {kind}", lambda kind=kind: Graphs(kind), features(4, 5), packed)


LIBRARIES: dict[str, Callable[[], Iterator[Case]]] = {
    "x_transformers": x_transformers, "linformer": sequences, "rtdl_revisiting_models": tables, "nflows": flows,
    "torch_geometric": graphs,
}  # fmt: skip


def cases() -> dict[str, Case]:
    """Those of the libraries that are installed."""
    found = {}
    for library, of_library in {**LIBRARIES, **VISION}.items():
        if importlib.util.find_spec(library) is not None:
            found |= {case.name: case for case in of_library()}
    return found
