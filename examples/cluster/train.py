"""A GPT on all ranks of a job: ``sbatch job.sh``, or ``mpiexec -n 8 python train.py``."""

import argparse
import os

import lightning as L

from lightning_axosparse import AxoSparseStrategy, GradualPruning
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=8, help="of a node, where Slurm does not say")
    options = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        # Slurm sets them for the job; they have to be those of the ranks that were started.
        devices=int(os.environ.get("SLURM_NTASKS_PER_NODE", options.ranks)),
        num_nodes=int(os.environ.get("SLURM_NNODES", 1)),
        max_steps=options.steps,
        strategy=AxoSparseStrategy(g_inter=options.stages, save_distributed_checkpoint=True),
        callbacks=[GradualPruning(0.8)],
    )
    heads = max(1, options.width // 64)
    model = GPT(width=options.width, depth=options.depth, heads=heads, context=128)
    trainer.fit(model, datamodule=TextDataModule(context=128, batch_size=32))
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['train_loss']):.3f}")
