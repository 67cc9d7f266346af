"""Fine-tune a causal language model from a local folder, whole or with LoRA.

``python finetune.py --model FOLDER --text FILE [--lora]``
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_axosparse import AxoSparseStrategy


class LanguageModel(L.LightningModule):
    def __init__(self, folder: str, lora: bool, rate: float):
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self):  # each rank makes and reads its own layers alone
        if self.model is not None:
            return
        self.model = AutoModelForCausalLM.from_pretrained(self.hparams.folder, use_cache=False)
        if self.hparams.lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = get_peft_model(self.model, config)

    def training_step(self, tokens, batch_idx):
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.rate)


def windows(folder: str, text: Path, length: int) -> torch.Tensor:
    """The text as tokens of the folder's tokenizer: int64 (windows, length)."""
    tokens = AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"]
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder that save_pretrained has written")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--layers", default="model.model.layers", help="their path in the module")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", default="tuned", help="folder for the result")
    options = parser.parse_args()

    L.seed_everything(0)
    # peft puts the model into two others.
    layers = options.layers.replace("model.", "model.base_model.model.", 1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=options.steps,
        strategy=AxoSparseStrategy(g_inter=2, pipeline=layers if options.lora else options.layers),
        logger=False,
        enable_checkpointing=False,
    )
    module = LanguageModel(options.model, options.lora, rate=1e-3 if options.lora else 1e-5)
    data = windows(options.model, options.text, options.length)
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))
    module.model.save_pretrained(options.save)
    print(f"loss {float(trainer.callback_metrics['train_loss']):.3f}, saved in {options.save}")
