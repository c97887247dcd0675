"""ResNet-50 and BERT-base in plain torch, and samples that take no time to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

Batch = tuple[Tensor, Tensor]


class Bottleneck(nn.Module):
    """Convolutions of 1 × 1, 3 × 3 and 1 × 1 beside a shortcut, itself a 1 × 1 convolution if the shape changes."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            *_normalised(given, width, 1, 1), nn.ReLU(), *_normalised(width, width, 3, stride), nn.ReLU()
        ).extend(_normalised(width, wide, 1, 1))
        same = given == wide and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else nn.Sequential(*_normalised(given, wide, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _normalised(given: int, width: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(given, width, size, stride, size // 2, bias=False), nn.BatchNorm2d(width)]


def resnet(blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """Make a residual network of bottlenecks (He et al. 2016, table 1), by default ResNet-50.

    Args:
        blocks: number of blocks at each resolution.
        width: width of the first blocks; it doubles with each resolution.
        classes: number of classes.
    """
    layers: list[nn.Module] = [nn.Sequential(*_normalised(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))]
    given = width
    for number, count in enumerate(blocks):
        for index in range(count):
            layers.append(Bottleneck(given, width << number, 2 if number and not index else 1))
            given = 4 * (width << number)
    return nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, classes)))


class Embeddings(nn.Module):
    """Embeddings of the tokens and their positions; all tokens are of the first sentence."""

    def __init__(self, vocabulary: int, positions: int, width: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.sentences = nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, 1e-12), nn.Dropout(dropout)
        for embedding in (self.words, self.places, self.sentences):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        kept: Tensor = self.dropout(self.norm(self.words(tokens) + self.places(places) + self.sentences.weight[0]))
        return kept


class Head(nn.Module):
    """Scores of the words, computed with the weights of their embeddings."""

    def __init__(self, width: int, words: nn.Embedding) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width, 1e-12)
        self.decoder = nn.Linear(width, words.num_embeddings)
        self.decoder.weight = words.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.decoder(self.norm(F.gelu(self.dense(x))))
        return scores


def bert(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    inner: int = 3072,
    vocabulary: int = 30522,
    dropout: float = 0.1,
    tied: bool = True,
) -> nn.Sequential:
    """Make a masked language model (Devlin et al. 2019) with 512 positions, by default BERT-base.

    Args:
        layers: number of layers.
        width: width of a token.
        heads: number of attention heads.
        inner: width between a layer's two linear modules.
        vocabulary: number of words.
        dropout: probability of dropout, in attention, too.
        tied: whether the head has the weights of the embeddings.
    """
    embeddings = Embeddings(vocabulary, 512, width, dropout)
    head = Head(width, embeddings.words if tied else nn.Embedding(vocabulary, width))
    sizes: Any = {"activation": "gelu", "layer_norm_eps": 1e-12, "batch_first": True}
    each = (nn.TransformerEncoderLayer(width, heads, inner, dropout, **sizes) for _ in range(layers))
    return nn.Sequential(embeddings, *each, head)


class Samples(Dataset[Any]):
    """Samples that repeat a few in memory; loaders must take whole batches.

    Args:
        pool: inputs and labels of the few.
        count: number of samples.
    """

    def __init__(self, pool: Batch, count: int) -> None:
        self.pool, self.count = pool, count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(indices) % len(self.pool[0])
        return self.pool[0][chosen], self.pool[1][chosen]


@dataclass(frozen=True)
class Kind:
    """A model and its data, at full size or tiny.

    Args:
        text: whether it reads words rather than pictures.
        sizes: arguments of :func:`bert` or :func:`resnet`.
        length: length of a text in words, or of a picture's sides in pixels.
        batch: number of samples in a mini-batch.
    """

    text: bool
    sizes: dict[str, Any]
    length: int
    batch: int

    def net(self) -> nn.Module:
        """Make the network, with the same values each time."""
        torch.manual_seed(1)
        return bert(**self.sizes) if self.text else resnet(**self.sizes)

    def samples(self, batches: int) -> Samples:
        """Make ``batches`` batches of random samples."""
        draws = torch.Generator().manual_seed(2)
        few = 2 * self.batch
        if self.text:
            words = torch.randint(self.sizes.get("vocabulary", 30522), (few, self.length), generator=draws)
            return Samples((words, words), batches * self.batch)
        shape = (few, 3, self.length, self.length)
        pictures = torch.randint(256, shape, dtype=torch.uint8, generator=draws)
        labels = torch.randint(self.sizes.get("classes", 1000), (few,), generator=draws)
        return Samples((pictures, labels), batches * self.batch)


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of the scores of classes, or of a text's words."""
    return F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten())


TINY_BERT = {"layers": 4, "width": 32, "heads": 2, "inner": 64, "vocabulary": 64, "dropout": 0.0}
TINY_RESNET = {"blocks": (1, 1), "width": 8, "classes": 10}


def batch_of(kind: Kind, memory: float, share: float) -> int:
    """Return the largest power of two, at most ``kind.batch``, whose pictures fit into ``share`` of ``memory`` bytes,
    at 0.1 GiB each, which ResNet-50 needs at 224²."""
    return min(kind.batch, 1 << int(math.log2(max(1.0, share * memory / (0.1 * 2**30)))))
