from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from families import tiny_model
from helpers import forward, random_batch
from prism_delta import Plan, steer
from prism_delta.errors import ArtifactError, PrismError, StorageError
from prism_delta.importer import import_projections

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")

LAYERS, HEADS, DIM = 3, 2, 8


def projections(*shape: int, rank: int = 3, seed: int = 0) -> torch.Tensor:
    """Random orthogonal projections [*shape, DIM, DIM] in float32, as the release stores them."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(*shape, DIM, DIM, generator=generator))
    return basis[..., :rank] @ basis[..., :rank].mT


PROJ, V_PROJ = projections(LAYERS, HEADS), projections(LAYERS, HEADS, rank=5, seed=1)
SCORES = torch.tensor([[0.0, 0.05], [0.1, 0.2], [0.4, 3.0]])
V_SCORES = SCORES.flip(0)
K_FILE = {"proj": PROJ, "norm_diffs": SCORES, "min_diff": 0.08, "layers": [0, 1, 2]}
KV_FILE = {
    "k_proj": PROJ,
    "v_proj": V_PROJ,
    "k_norm_diffs": SCORES,
    "v_norm_diffs": V_SCORES,
    "min_diff": 0.08,
    "layers": [0, 1, 2],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "projections.pt"


def imported(path: Path, content: Any, **options: Any) -> Plan:
    torch.save(content, path)
    return import_projections(path, **options)


def without(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in names}


def edit(gain: float, projection: torch.Tensor, scores: torch.Tensor, shift: float) -> torch.Tensor:
    """gain * softplus(D - shift) * P, written out."""
    weights = torch.log1p(torch.exp(scores.double() - shift))
    return (gain * weights[..., None, None] * projection.double()).float()


@pytest.mark.parametrize("gain", [1.0, 0.4, -0.3])
def test_a_key_file_is_the_formula(path: Path, gain: float) -> None:
    plan = imported(path, K_FILE, key_gain=gain)
    expected = edit(gain, PROJ, SCORES, 0.08)
    assert list(plan.edits) == [(layer, "key") for layer in range(LAYERS)]
    for layer in range(LAYERS):
        torch.testing.assert_close(plan.matrix(layer, "key"), expected[layer], rtol=1e-6, atol=0)


def test_a_key_and_value_file_is_the_formula(path: Path) -> None:
    plan = imported(path, KV_FILE, key_gain=0.4, value_gain=0.2)
    keys, values = edit(0.4, PROJ, SCORES, 0.08), edit(0.2, V_PROJ, V_SCORES, 0.08)
    assert len(plan.edits) == 2 * LAYERS
    for layer in range(LAYERS):
        torch.testing.assert_close(plan.matrix(layer, "key"), keys[layer], rtol=1e-6, atol=0)
        torch.testing.assert_close(plan.matrix(layer, "value"), values[layer], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("gains", "channels"),
    [
        ({}, ["key"]),
        ({"value_gain": 0.1}, ["key", "value"]),
        ({"key_gain": 0.0, "value_gain": 0.1}, ["value"]),
        ({"key_gain": 0.0}, []),
    ],
    ids=str,
)
def test_a_gain_of_0_leaves_a_channel_out(path: Path, gains: dict[str, float], channels: list[str]) -> None:
    assert sorted({channel for _, channel in imported(path, KV_FILE, **gains).edits}) == channels


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (projections(), {(0, "key"): (1, DIM)}),
        (projections(HEADS), {(0, "key"): (HEADS, DIM)}),
        (PROJ, {(layer, "key"): (HEADS, DIM) for layer in range(LAYERS)}),
        (PROJ.bfloat16(), {(layer, "key"): (HEADS, DIM) for layer in range(LAYERS)}),
    ],
    ids=["2-D", "3-D", "4-D", "bfloat16"],
)
@pytest.mark.parametrize("bare", [True, False], ids=["bare", "dict"])
def test_every_rank_of_tensor_is_read(path: Path, tensor: torch.Tensor, shape: dict[Any, Any], bare: bool) -> None:
    plan = imported(path, tensor if bare else {"proj": tensor}, key_gain=2.0)
    assert plan.shape == shape
    found = torch.stack([plan.matrix(layer, "key") for layer, _ in plan.edits])
    assert torch.equal(found, 2 * tensor.float().reshape(found.shape))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_layers_are_matched_by_id(path: Path, as_tensor: bool) -> None:
    ids = [7, 3, 12]
    plan = imported(path, {**K_FILE, "layers": torch.tensor(ids) if as_tensor else ids})
    expected = edit(1.0, PROJ, SCORES, 0.08)
    assert [layer for layer, _ in plan.edits] == [3, 7, 12]
    for number, layer in enumerate(ids):
        torch.testing.assert_close(plan.matrix(layer, "key"), expected[number], rtol=1e-6, atol=0)
        assert torch.equal(plan.stats[layer, "key"].score, SCORES[number].double())


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (without(K_FILE, "norm_diffs"), {}),
        ({**K_FILE, "norm_diffs": None}, {}),
        (without(K_FILE, "norm_diffs", "min_diff", "layers"), {}),
        (K_FILE, {"uniform": True}),
    ],
    ids=["no norm_diffs", "norm_diffs None", "projections alone", "uniform"],
)
def test_the_weight_is_1(path: Path, content: dict[str, Any], options: dict[str, Any]) -> None:
    plan = imported(path, content, key_gain=0.4, **options)
    for layer in range(LAYERS):
        assert torch.equal(plan.matrix(layer, "key"), (0.4 * PROJ[layer].double()).float())
        assert plan.stats[layer, "key"].weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("content", [without(K_FILE, "min_diff"), {**K_FILE, "min_diff": None}], ids=["absent", "None"])
def test_without_min_diff_the_shift_is_0(path: Path, content: dict[str, Any]) -> None:
    plan = imported(path, content)
    torch.testing.assert_close(plan.matrix(2, "key"), edit(1.0, PROJ, SCORES, 0.0)[2], rtol=1e-6, atol=0)


def test_heads_that_are_off_stay_off(path: Path) -> None:
    gated = PROJ.clone()
    gated[0], gated[1, 0] = 0, 0
    plan = imported(path, {**K_FILE, "proj": gated})
    assert plan.matrix(0, "key") is None
    assert not plan.matrix(1, "key")[0].any()
    assert plan.matrix(1, "key")[1].any()
    assert (plan.stats[1, "key"].weight != 0).tolist() == [False, True]
    found = plan.describe()["channels"]["key"]
    assert (found["layers"], found["heads"], found["of_heads"]) == (2, 3, 6)


def test_the_facts_of_a_head_are_kept(path: Path) -> None:
    plan = imported(path, KV_FILE, key_gain=0.4, value_gain=0.1)
    assert plan.stats[1, "key"].rank.tolist() == [3, 3]
    assert plan.stats[1, "value"].rank.tolist() == [5, 5]
    torch.testing.assert_close(plan.stats[1, "key"].weight, torch.log1p(torch.exp(SCORES[1].double() - 0.08)))
    assert plan.header["method"] == "imported"
    assert plan.header["params"] == {"key_gain": 0.4, "value_gain": 0.1, "uniform": False}


def test_an_imported_plan_is_saved_and_steers(path: Path, tmp_path: Path) -> None:
    plan = imported(path, KV_FILE, value_gain=0.1)
    again = Plan.load(plan.save(tmp_path / "x.plan.safetensors"))
    assert again.fingerprint == plan.fingerprint
    model, batch = tiny_model("llama"), random_batch()
    with steer(model, again, batch) as trace:
        edited = forward(model, batch).logits
    assert trace.layers == [0, 1, 2]
    assert not torch.equal(edited, forward(model, batch).logits)


# --- what is refused ----------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes the file named in it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return open, (str(self.target), "w")


@pytest.mark.parametrize("form", ["zip", "legacy", *range(pickle.HIGHEST_PROTOCOL + 1)])
def test_code_in_a_file_is_refused_and_not_run(path: Path, form: Any) -> None:
    crater = path.parent / "crater"
    payload = {**K_FILE, "extra": Bomb(crater)}
    if isinstance(form, int):
        path.write_bytes(pickle.dumps(payload, protocol=form))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(ArtifactError) as caught:
        import_projections(path)
    assert not crater.exists()
    message = str(caught.value)
    assert message.startswith(f"{path} is not a .pt file of plain tensors, and is not loaded otherwise")
    # torch's own message goes on to say how to load it all the same.
    assert "can still be loaded" not in message
    assert "\x1b" not in message


WRONG = {
    "not square": ({"proj": torch.ones(3, 2, 8, 4)}, r"must be \[layer, head, dim, dim\], found \[3, 2, 8, 4\]"),
    "5-D": ({"proj": PROJ[None]}, r"found \[1, 3, 2, 8, 8\]"),
    "1-D": ({"proj": torch.ones(8)}, r"found \[8\]"),
    "no tensor": ({"proj": "P"}, "found str"),
    "no numbers": ({"proj": torch.zeros(1, 2, 0, 0)}, "projections"),
    "NaN": ({"proj": torch.full((3, 2, 8, 8), torch.nan)}, "NaN or infinite"),
    "infinite": ({"k_proj": PROJ, "v_proj": V_PROJ * torch.inf}, "NaN or infinite"),
    "scores of another shape": ({**K_FILE, "norm_diffs": torch.ones(2, 3)}, r"must be \[3, 2\], found \[2, 3\]"),
    "scores in a list": ({**K_FILE, "norm_diffs": SCORES.tolist()}, "found list"),
    "NaN scores": ({**K_FILE, "norm_diffs": SCORES * torch.nan}, "norm_diffs"),
    "too few ids": ({**K_FILE, "layers": [0, 1]}, "3 layers of projections, 2 layer ids"),
    "one id": ({**K_FILE, "layers": 3}, "layers"),
    "ids in words": ({**K_FILE, "layers": ["a", "b", "c"]}, "layers"),
    "ids twice": ({**K_FILE, "layers": [0, 1, 1]}, "layers"),
    "negative ids": ({**K_FILE, "layers": [-1, 0, 1]}, "layers"),
    "shift in words": ({**K_FILE, "min_diff": "small"}, "min_diff"),
    "NaN shift": ({**K_FILE, "min_diff": torch.nan}, "min_diff"),
    "no projections": ({"weights": PROJ}, "expected proj, k_proj or v_proj, found .*weights"),
    "no names": ({1: PROJ, "a": PROJ}, "expected proj, k_proj or v_proj"),
    "a list": ([PROJ], "holds a list; expected a tensor or a dict of tensors"),
    "nothing": (None, "holds a NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_other_contents_are_refused(path: Path, name: str) -> None:
    content, reason = WRONG[name]
    with pytest.raises(ArtifactError, match=reason):
        imported(path, content)


def test_a_value_gain_needs_value_projections(path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"holds no value projections .*; set the value gain to 0"):
        imported(path, K_FILE, value_gain=0.1)


@pytest.mark.parametrize("gain", [float("nan"), float("inf")])
def test_gains_are_finite(path: Path, gain: float) -> None:
    with pytest.raises(PrismError):
        imported(path, K_FILE, key_gain=gain)


@pytest.mark.parametrize(
    "data",
    [b"", b"hello world", b"\x80", b"\x80\x02", b"\x80\x04\x95", b"PK\x03\x04", b"(", b"]q", b"\0" * 100, b"\xff" * 100,
     b"\x80\x02\x8a\x0al\xfc"],
    ids=repr,
)  # fmt: skip
def test_other_bytes_are_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"is not a \.pt file of plain tensors"):
        import_projections(path)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_file_cut_anywhere_is_refused(path: Path, form: str) -> None:
    whole = io.BytesIO()
    torch.save({"proj": projections(1)}, whole, _use_new_zipfile_serialization=form == "zip")
    data = whole.getvalue()
    for length in range(0, len(data) - 1, 1 + len(data) // 60):
        path.write_bytes(data[:length])
        with pytest.raises(ArtifactError, match=r"is not a \.pt file of plain tensors"):
            import_projections(path)


@pytest.mark.parametrize("name", ["nothing.pt", ""], ids=["missing", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        import_projections(tmp_path / name)


def test_a_file_of_some_layers_steers_those(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = tmp_path / "last.pt"
    torch.save({"proj": torch.eye(8).repeat(1, 2, 1, 1), "layers": [2]}, path)
    plan = import_projections(path)
    batch = random_batch()
    with steer(model, plan, batch) as trace:
        forward(model, batch)
    assert trace.layers == [2]
