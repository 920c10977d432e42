"""Makes the device "cuda" mean the CPU in this process, so that NeMo and megatron-core train where there is no GPU.

They name the device in hundreds of places. What runs then is their control flow, their collectives (over gloo) and
their files; nothing is learned about devices, streams and copies. For processes that do nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["install", "install_fused_adam"]

CPU = torch.device("cpu")


def install() -> None:
    numpy: Any = importlib.import_module("numpy")
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod  # megatron-core before 0.16; gone in numpy 2
    cuda: Any = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "_lazy_init"):
        setattr(cuda, name, _nothing())
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.reset_peak_memory_stats = _nothing()
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.is_initialized = lambda: True
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = _OneGenerator()
    cuda._lazy_call = lambda call, **_: call()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    for kind in ("Float", "Int", "Long", "Byte"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = tensor.pin_memory = module.cuda = lambda self, *_, **__: self
    mode: Any = _CudaIsCpu()
    mode.__enter__()


def install_fused_adam() -> None:
    """Stands in for Apex's, without which Megatron's distributed optimizer cannot save: torch's has a step for each
    parameter. Call it before anything of Megatron is imported."""
    apex: Any = types.ModuleType("apex")
    apex.__spec__ = importlib.machinery.ModuleSpec("apex", None)
    apex.optimizers = types.ModuleType("apex.optimizers")
    apex.optimizers.FusedAdam, apex.optimizers.FusedSGD = FusedAdam, torch.optim.SGD
    sys.modules.update({"apex": apex, "apex.optimizers": apex.optimizers})
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    del sys.modules["apex"], sys.modules["apex.optimizers"]
    DistributedOptimizer.load_state_dict = torch.no_grad()(DistributedOptimizer.load_state_dict)


class FusedAdam(torch.optim.Optimizer):
    """Adam with its step in the group, as Apex's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                unbiased = state["exp_avg"] / (1 - first ** group["step"])
                size = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(unbiased, size, value=-group["lr"])


def _nothing() -> Callable[..., None]:
    """Returns a function that does nothing, a new one each time: torch's compiler has a rule for each name."""
    return lambda *_, **__: None


def _placed(device: Any) -> Any:
    if isinstance(device, bool):
        return device
    return CPU if isinstance(device, int) or str(device).startswith("cuda") else device


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.")
        if "device" in kwargs:
            kwargs["device"] = _placed(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = (
                args[0],
                *(_placed(one) if isinstance(one, str | torch.device) or type(one) is int else one for one in args[1:]),
            )
        return func(*args, **kwargs)


class _OneGenerator(list[Any]):
    def __getitem__(self, _: Any) -> Any:
        return torch.default_generator


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = synchronize = lambda *_, **__: None

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Stream(_Event):
    wait_stream = wait_event = lambda *_, **__: None

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass
