"""Two optimizers, stepped by hand: a GAN that draws digits, as it is written for DDP. ``python gan.py``"""

from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy

NOISE, PIXELS = 16, 64


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.draws = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, PIXELS), nn.Tanh())
        self.judges = nn.Sequential(nn.Linear(PIXELS, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def drawn(self, count: int) -> Tensor:
        images: Tensor = self.draws(torch.randn(count, NOISE, device=self.device))
        return images

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        optimizers: Any = self.optimizers()
        artist, judge = optimizers

        with judge.toggle_model():
            judge.zero_grad()
            wrong = nn.functional.softplus(self.judges(self.drawn(len(real)).detach())).mean()
            missed = nn.functional.softplus(-self.judges(real)).mean()
            self.manual_backward(wrong + missed)
            self.clip_gradients(judge, 1.0, "norm")
            judge.step()

        with artist.toggle_model():
            artist.zero_grad()
            seen_through = nn.functional.softplus(-self.judges(self.drawn(len(real)))).mean()
            self.manual_backward(seen_through)
            artist.step()

        self.log_dict({"judge": (wrong + missed).detach(), "artist": seen_through.detach()})

    def configure_optimizers(self) -> Any:
        betas = 0.5, 0.99
        return [torch.optim.Adam(part.parameters(), 2e-3, betas) for part in (self.draws, self.judges)]

    @torch.no_grad()
    def distance(self, real: Tensor) -> float:
        """Return the distance between the mean drawing and the mean of the real images."""
        return float((self.drawn(512).mean(0) - real.mean(0)).norm())


if __name__ == "__main__":
    torch.manual_seed(0)  # each worker runs this script
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    model = GAN()
    before = model.distance(images)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SDPipeStrategy(), max_epochs=20, logger=False)
    trainer.fit(model, DataLoader(TensorDataset(images), batch_size=32, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        print(f"the mean drawing was {before:.2f} from that of the digits, and is {model.distance(images):.2f}")
