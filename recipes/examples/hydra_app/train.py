import hydra
import lightning as L
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe.configuration import check


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    check(config)
    L.seed_everything(config.seed)
    x = torch.randn(64, 4)
    strategy = hydra.utils.instantiate(config.strategy)
    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=1, logger=False)
    trainer.fit(Line(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), config.batch_size))


if __name__ == "__main__":
    main()
