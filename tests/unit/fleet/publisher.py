"""A process that publishes as fast as it can."""

import torch

from ringmap import Weights
from tests.unit.fleet.models import filled, net


def publish(path, pipe):
    """Publish sets whose numbers are their step, until told to stop; say the last step."""
    torch.set_num_threads(1)
    weights, model, step = Weights(path), net(), 0
    while not pipe.poll():
        step += 1
        model.load_state_dict(filled(step, 64).state_dict())
        weights.publish(model, step)
    pipe.send(step)
