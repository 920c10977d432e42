"""Text for NeMo: the windows of ``recipes.pretrain`` as batches of Megatron, whose position is in the checkpoint."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core.num_microbatches_calculator import update_num_microbatches
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.io.mixin import IOMixin
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import Dataset

from recipes.pretrain.data import Tokenizer, Windows
from recipes.quickstart.data import read_corpus

__all__ = ["Text", "TextTokenizer"]

#: Least number of windows that the text is cut into; when it is short they overlap.
_WINDOWS = 4096


class TextTokenizer(IOMixin):
    """What NeMo asks of a tokenizer when it builds a model; it is in the ``context`` of a checkpoint."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = self.eos_id = self.pad_id = 0


class Text(pl.LightningDataModule):
    """Windows of text, in one order for the whole training; a resume goes on after the samples that were consumed.

    Put NeMo's ``PreTrainingDataModule`` in its place for a real training: it keeps its position in the same way.

    Args:
        tokenizer: of :func:`recipes.pretrain.data.load_tokenizer`.
        folder: of the text; None: the sources of Python's library.
        length: tokens of a sequence.
        samples: sequences of the whole training; short text is seen again and again.
        val_samples: sequences of a validation.
        seed: of the order.
        attention_mask: batches contain the mask, which only Transformer Engine does without.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        folder: str | None,
        length: int,
        micro_batch: int,
        global_batch: int,
        samples: int,
        val_samples: int,
        seed: int,
        attention_mask: bool,
    ) -> None:
        super().__init__()
        self.tokenizer = TextTokenizer(tokenizer.size)
        self.seq_length, self.micro_batch_size, self.global_batch_size = length, micro_batch, global_batch  # NeMo asks
        self.data_sampler = MegatronDataSampler(
            seq_len=length, micro_batch_size=micro_batch, global_batch_size=global_batch
        )
        tokens = tokenizer.encode(read_corpus(folder))
        cut = len(tokens) * 19 // 20
        train = Windows(tokens[:cut], length=length, count=max(_WINDOWS, (cut - 1) // length))
        val = Windows(tokens[cut:], length=length, count=max(1, val_samples))
        self._train = _Batches(train, samples=samples, seed=seed, attention_mask=attention_mask)
        self._val = _Batches(val, samples=len(val), seed=seed, attention_mask=attention_mask)
        self._began_at = 0

    def train_dataloader(self) -> Any:
        self._began_at = self.data_sampler.init_global_step = self.trainer.global_step
        return WrappedDataLoader(mode="train", dataset=self._train)

    def val_dataloader(self) -> Any:
        return WrappedDataLoader(mode="validation", dataset=self._val)

    def state_dict(self) -> dict[str, Any]:
        steps = self.trainer.global_step - self._began_at
        return {"consumed_samples": self.data_sampler.compute_consumed_samples(steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        consumed = state["consumed_samples"]
        self.data_sampler.init_consumed_samples = self.data_sampler.prev_consumed_samples = consumed
        update_num_microbatches(consumed_samples=consumed, consistency_check=False)
        self.data_sampler.if_first_step = 1


class _Batches(Dataset[dict[str, torch.Tensor]]):
    """Windows as Megatron's GPT takes them, shuffled by ``seed``; Megatron's sampler walks through them in order."""

    def __init__(self, windows: Windows, *, samples: int, seed: int, attention_mask: bool) -> None:
        self._windows, self._samples = windows, samples
        self._order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        self._attention_mask = attention_mask

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._windows[int(self._order[index % len(self._order)])]
        length = len(tokens) - 1
        batch = {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(length),
            "position_ids": torch.arange(length),
        }
        if self._attention_mask:  # True: not seen
            batch["attention_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1).unsqueeze(0)
        return batch
