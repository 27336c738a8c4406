"""Collect numbers, images and histograms of a training without waiting for the device.

Start with `storage`: users put values into an `EventStorage`, and its `collect` returns packets, which the
background turns into events. The package may import torch, `state`, `events` and `util`, and no package above
them.
"""

from eventloop.metrics.current import get_event_storage as get_event_storage
from eventloop.metrics.storage import EventStorage as EventStorage
