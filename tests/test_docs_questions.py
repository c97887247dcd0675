"""Questions of new users: each has its answer under a heading with its words, on one page only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"

ANSWERS: dict[str, tuple[str, str]] = {
    "Has it *run* on *GPUs*?": ("gpus.md", "Has it run on GPUs?"),
    "Which are the *longest run*, the *largest model* and the *most workers* so far?": (
        "benchmarks.md",
        "The longest run, the largest model and the most workers so far",
    ),
    "Does it reach the *accuracy* of *DDP*, with how many more *samples*?": (
        "benchmarks.md",
        "Accuracy and samples compared with DDP",
    ),
    "Which *learning rate* and *batch size* do I take over?": ("choosing.md", "Learning rate and batch size"),
    "How much is *lost* on *equal devices*?": ("choosing.md", "Speed lost on equal devices"),
    "What happens when a *machine dies*?": ("faults.md", "When a machine dies"),
    "What happens when *all machines lose power*?": ("faults.md", "When all machines lose power"),
    "Can I *resum*e on *fewer or more* devices?": ("checkpoints.md", "Resuming on fewer or more devices"),
    "Are the *optimizer states* of all *pipelines* saved?": (
        "checkpoints.md",
        "The optimizer states of all pipelines",
    ),
    "Can I go *back to DDP*?": ("from_ddp.md", "Back to DDP"),
    "How do I use machines with *1, 2 and 3 GPUs*?": ("unlike_devices.md", "Machines with 1, 2 and 3 GPUs"),
    "Can the *larger card* get a *larger batch*?": ("choosing.md", "A larger batch on the larger card"),
    "How much *memory* does it take *beyond DDP*?": ("exchange.md", "Memory beyond DDP's"),
    "Which *network* do *P parameters* need at *1 and 10 Gbit/s*?": (
        "exchange.md",
        "The network that P parameters need at 1 and 10 Gbit/s",
    ),
    "Which *ports* must *firewalls* let through?": ("launching.md", "Ports and firewalls"),
    "Does it work over a *VPN*, through *NAT*, in *Docker*, with *IPv6*?": (
        "launching.md",
        "VPN, NAT, Docker and IPv6",
    ),
    "May machines have different *CUDA*, *drivers* or *NCCL*?": (
        "gpus.md",
        "Machines with different CUDA, drivers or NCCL",
    ),
    "Do *NVIDIA* and *AMD* go together?": ("gpus.md", "NVIDIA beside AMD"),
    "What about a *card* without *bf16*?": ("gpus.md", "A card without bf16"),
    "Do *torch.compile* and *FSDP* work in a *stage*?": ("partition.md", "torch.compile and FSDP in a stage"),
    "Can I train *GANs*, or by *RL*?": ("from_ddp.md", "GANs and reinforcement learning (RL)"),
    "Can I call *generate* in *validation*?": (
        "lightning.md",
        "`generate`, samples and embeddings in hooks and validation",
    ),
    "How do *pretrained weights* get into *stages*?": ("partition.md", "Pretrained weights into stages"),
    "Does *QLoRA* work?": ("partition.md", "LoRA and QLoRA"),
    "How do I start it under *SLURM*?": ("launching.md", "SLURM"),
    "Does it run on *Windows* or *macOS*?": ("start.md", "Windows and macOS"),
    "*Who* is *slow*?": ("who_is_slow.md", "Who is slow"),
    "What is *logged*, and *where*?": ("who_is_slow.md", "What is logged, and where"),
    "How do I *stop* a *run*?": ("launching.md", "How to stop a run"),
    "How do I *report* a *bug*?": ("troubleshooting.md", "How to report a bug"),
    "How does it compare with *torchft*, *Hivemind*, *DeepSpeed* and *Accelerate*?": (
        "choosing.md",
        "Compared with torchft, Hivemind, DeepSpeed and Accelerate",
    ),
}
"""Pages and headings of the answers. The words between asterisks are in the heading."""


def sections(page: Path) -> dict[str, str]:
    """Return the text below each heading of a page, up to the next one."""
    text = re.sub(r"^ *```.*?^ *```$", "code", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    _, *parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("question", ANSWERS)
def test_a_search_for_its_words_finds_the_answer_on_one_page(question: str) -> None:
    page, heading = ANSWERS[question]
    assert sections(DOCS / page)[heading].strip()
    words = [word.casefold() for word in re.findall(r"\*(.+?)\*", question)]
    found = {
        path.name
        for path in DOCS.glob("*.md")
        for each in sections(path)
        if all(re.search(rf"\b{re.escape(word)}", each.casefold()) for word in words)
    }
    assert found == {page}


def test_documents_stay_short() -> None:
    """In words as ``wc -w`` counts them, tables included; the aim is 40,000. Merge or delete what another page says."""
    assert sum(len(path.read_text().split()) for path in DOCS.glob("*.md")) <= 40_000
