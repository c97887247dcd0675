"""An actor and a critic with an optimizer each: the actor guesses which digit it sees, and hears only whether it was
right. ``python actor_critic.py``"""

from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import SDPipeStrategy


class ActorCritic(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        optimizers: Any = self.optimizers()
        acts, judges = optimizers
        policy = self.actor(images).log_softmax(1)
        guess = torch.multinomial(policy.exp(), 1)
        reward = (guess.squeeze(1) == digits).float()
        advantage = reward - self.critic(images).squeeze(1)

        judges.zero_grad()
        self.manual_backward(advantage.square().mean())
        judges.step()

        acts.zero_grad()
        gained = policy.gather(1, guess).squeeze(1) * advantage.detach()
        entropy = -(policy.exp() * policy).sum(1)
        self.manual_backward(-(gained + 0.01 * entropy).mean())
        self.clip_gradients(acts, 1.0, "norm")
        acts.step()
        self.log("reward", reward.mean(), on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.actor.parameters(), 3e-3), torch.optim.Adam(self.critic.parameters(), 3e-3)

    @torch.no_grad()
    def right(self, images: Tensor, digits: Tensor) -> float:
        """Return the share of digits for which the most likely guess is right."""
        return float((self.actor(images).argmax(1) == digits).float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)  # each worker runs this script
    data = load_digits()
    images, digits = torch.tensor(data.data, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)
    model = ActorCritic()
    before = model.right(images, digits)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SDPipeStrategy(), max_epochs=15, logger=False)
    trainer.fit(model, DataLoader(TensorDataset(images, digits), batch_size=32, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        print(f"it guessed {before:.0%} of the digits right before, and {model.right(images, digits):.0%} after")
