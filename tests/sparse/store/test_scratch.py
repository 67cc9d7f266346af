from __future__ import annotations

import threading

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_axosparse.pipeline.profile import activation_bytes
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.store.scratch import scratch

CPU = torch.device("cpu")


def address(use, numel=10, dtype=torch.float32):
    return scratch.take(use, numel, dtype, CPU).data_ptr()


def test_a_use_has_its_memory_again_in_any_dtype_and_another_use_has_its_own():
    assert address("tile") == address("tile", 5) == address("tile", 5, torch.int64)
    assert address("tile") != address("positions")
    assert scratch.take("tile", 1000, torch.bfloat16, CPU).shape == (1000,)


def test_memory_that_grew_serves_every_dtype():
    sizes = [100, 30, 1000, 60]
    for size, dtype in zip(sizes, [torch.float32, torch.bfloat16] * 2, strict=True):
        assert scratch.take("tile", size, dtype, CPU).fill_(1).sum() == size
    assert address("tile") == address("tile", 1, torch.bool) == address("tile", 10, torch.bfloat16)


def test_a_thread_has_its_own():
    found = []
    mine = address("tile")
    thread = threading.Thread(target=lambda: found.append(address("tile")))
    thread.start()
    thread.join()
    assert found != [mine]


def test_memory_first_taken_in_inference_mode_can_be_written_outside_it():
    def take():
        return scratch.take("tile", 10, torch.float32, CPU).zero_()

    def first_in_inference_mode():
        with torch.inference_mode():
            take()
        found.append(take().is_inference())

    found = []
    thread = threading.Thread(target=first_in_inference_mode)
    thread.start()
    thread.join()
    assert found == [False]


def test_results_outlive_the_next_use():
    """Outputs, gradients and dense copies share no memory with the scratch that made them."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 16), nn.Linear(16, 32))
    sparsify(
        layers, {n: torch.rand(p.shape) < 0.5 for n, p in layers.named_parameters() if p.dim() > 1}
    )
    inputs = torch.arange(50)
    output = layers(inputs)
    output.sum().backward()
    copies = [layer.weight.dense() for layer in layers]
    held = [output.detach(), *copies, *(p.grad for p in layers.parameters())]
    before = [tensor.clone() for tensor in held]
    for use in ("tile", "positions"):
        scratch.take(use, 5000, torch.float32, CPU).fill_(torch.nan)
    assert all(torch.equal(*both) for both in zip(held, before, strict=True))


def test_memory_is_given_back():
    storage = StorageWeakRef(scratch.take("tile", 100, torch.float32, CPU).untyped_storage())
    assert not storage.expired()
    scratch.clear()
    assert storage.expired()


def test_modes_that_count_what_operators_make_do_not_see_it():
    scratch.clear()
    with activation_bytes(CPU, ()) as count:
        scratch.take("tile", 100, torch.float32, CPU).zero_()
        assert count() == 0


def test_two_threads_train_at_once():
    def gradient(seed):
        generator = torch.Generator().manual_seed(seed)
        layer = nn.Linear(200, 300, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(300, 200, generator=generator))
        sparsify(layer, {"weight": torch.rand(300, 200, generator=generator) < 0.1})
        for _ in range(20):
            layer(torch.ones(4, 200)).square().sum().backward()
        return next(layer.parameters()).grad

    def run(seed):
        found[seed] = gradient(seed)

    expected, found = [gradient(seed) for seed in range(2)], [None, None]
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*both) for both in zip(expected, found, strict=True))
