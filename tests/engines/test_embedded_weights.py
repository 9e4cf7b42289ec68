import base64
import io
import pickle
from pathlib import Path

import pytest
import torch
from tiny_model import make_model, save_model

from rlkit.engines.embedded.weight_payload import read_payload, torch_dtype
from rlkit.engines.embedded.weights import WeightStore
from rlkit.types.errors import EngineError

VOCAB = 264


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters(remove_duplicate=False)}


def test_a_tied_head_goes_by_the_embeddings_name():
    model = make_model(seed=0, tie=True, vocab_size=VOCAB)
    store = WeightStore(model)
    new = torch.randn(VOCAB, 64)
    store.load_all([("model.embed_tokens.weight", new), ("lm_head.weight", torch.zeros(VOCAB, 64))])
    assert torch.equal(model.get_input_embeddings().weight, new)
    assert torch.equal(model.get_output_embeddings().weight, new)
    payload = store.checker("checksum")
    assert payload is not None and "lm_head.weight" not in payload["checksums"]


def test_an_untied_head_is_a_tensor_of_its_own():
    model = make_model(seed=0, tie=False, vocab_size=VOCAB)
    store = WeightStore(model)
    before = model.get_input_embeddings().weight.clone()
    store.load_all([("lm_head.weight", torch.zeros(VOCAB, 64))])
    assert torch.equal(model.get_output_embeddings().weight, torch.zeros(VOCAB, 64))
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_nothing_is_loaded_unless_everything_fits():
    model = make_model(seed=0, tie=True, vocab_size=VOCAB)
    store, before = WeightStore(model), weights_of(model)
    with pytest.raises(EngineError, match="no tensor model\\.other"):
        store.load_all([("model.norm.weight", torch.zeros(64)), ("model.other", torch.zeros(1))])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(model).items())


def test_values_are_cast_to_the_models_dtype():
    model = make_model(seed=0, tie=True, vocab_size=VOCAB).to(torch.bfloat16)
    WeightStore(model).load_all([("model.norm.weight", torch.full((64,), 1.001))])
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert (model.model.norm.weight == 1.0).all()


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_sleep_frees_the_storage_and_wake_leaves_nothing_that_looks_like_weights(tie: bool):
    model = make_model(seed=0, tie=tie, vocab_size=VOCAB)
    store, before = WeightStore(model), weights_of(model)
    store.sleep()
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == 0
    store.wake()
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert len(store.stale) == len(list(model.parameters()))
    names = list(before)
    store.load_all([(name, before[name]) for name in names[:-1]])
    if not tie:
        assert store.stale == {"lm_head.weight"}
    store.load_all([(names[-1], before[names[-1]])])
    assert store.stale == set()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(model).items())


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_folder_gives_its_weights(tmp_path: Path, tie: bool):
    folder = save_model(tmp_path / "new", seed=4, tie=tie)
    model = make_model(seed=0, tie=tie, vocab_size=VOCAB)
    WeightStore(model).load_folder(folder)
    expected = weights_of(make_model(seed=4, tie=tie, vocab_size=VOCAB))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(model).items())


def test_a_sharded_folder_gives_its_weights(tmp_path: Path):
    new = make_model(seed=4, tie=True, vocab_size=VOCAB)
    new.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = make_model(seed=0, tie=True, vocab_size=VOCAB)
    WeightStore(model).load_folder(tmp_path)
    expected = weights_of(new)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(model).items())


def test_an_incomplete_folder_changes_nothing(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    model = make_model(seed=0, tie=True, vocab_size=VOCAB)
    before = model.model.norm.weight.clone()
    with pytest.raises(EngineError, match="lacks"):
        WeightStore(model).load_folder(tmp_path)
    assert torch.equal(model.model.norm.weight, before)
    with pytest.raises(EngineError, match="is not a folder"):
        WeightStore(model).load_folder(tmp_path / "nothing")


class Bomb:
    def __reduce__(self):
        return (print, ("boom",))


def encode(content: object) -> str:
    return base64.b64encode(pickle.dumps(content)).decode()


def test_a_payload_can_only_build_tensors():
    with pytest.raises(EngineError, match=r"may not contain builtins\.print"):
        read_payload([encode([("a", Bomb())])], None)


@pytest.mark.parametrize(
    ("payloads", "load_format", "reason"),
    [
        (["!!"], None, "cannot read"),
        ([], None, "0 payloads"),
        ([encode({"a": 1})], "flattened_bucket", "flattened bucket is a dict"),
        ([encode({"a": 1})], None, "list of"),
        ([encode([])], "other", "Unknown load_format=other"),
    ],
)
def test_payloads_that_are_none(payloads: list[str], load_format: str | None, reason: str):
    with pytest.raises(EngineError, match=reason):
        read_payload(payloads, load_format)


def test_tensors_shared_by_file_descriptor_are_refused_with_the_remedy():
    from multiprocessing.reduction import ForkingPickler

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump([("a", torch.zeros(3).share_memory_())])
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    with pytest.raises(EngineError, match="file_system"):
        read_payload([base64.b64encode(buffer.getvalue()).decode()], None)


def test_dtypes_by_name():
    assert torch_dtype("bfloat16") is torch_dtype("torch.bfloat16") is torch.bfloat16
    with pytest.raises(EngineError, match="not a dtype"):
        torch_dtype("system")
