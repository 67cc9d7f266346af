from __future__ import annotations

import struct

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboardX.proto.event_pb2 import Event

from lightning_axosparse.callbacks.report.loggers import log_pictures
from lightning_axosparse.callbacks.report.plots import plots, save_plots


class WithImages:
    """Takes images as loggers of Lightning such as Weights & Biases do."""

    def __init__(self):
        self.logged = []

    def log_image(self, key, images, step=None):
        self.logged.append((key, images, step))


@pytest.fixture
def pictures(facts, tmp_path):
    return save_plots(plots(facts, []), tmp_path)


def events(folder):
    """The events in TensorBoard's file, which is a TFRecord."""
    [file] = folder.rglob("events.out.*")
    content, position, found = file.read_bytes(), 0, []
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        found.append(Event.FromString(content[position + 12 : position + 12 + length]))
        position += 12 + length + 4
    return found


def test_tensorboard_gets_every_picture(pictures, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    log_pictures([logger], tmp_path, pictures, 7)
    logger.experiment.close()  # a flush does not wait for the thread that writes
    shown = [(v.tag, e.step, v.image) for e in events(tmp_path) for v in e.summary.value]
    assert [(tag, step) for tag, step, _ in shown] == [("loss", 7), ("mask_distance", 7)]
    assert all(image.encoded_image_string.startswith(b"\x89PNG") for _, _, image in shown)
    assert (shown[0][2].width, shown[0][2].height) == (960, 540)


def test_a_logger_for_images_gets_their_files_and_others_none(pictures, tmp_path):
    logger = WithImages()
    log_pictures([CSVLogger(tmp_path), logger], tmp_path, pictures, 7)
    assert logger.logged == [
        (name.removesuffix(".png"), [str(tmp_path / name)], 7) for name in pictures
    ]
