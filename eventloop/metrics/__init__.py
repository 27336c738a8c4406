"""Collect numbers, images and histograms of a training without waiting for the device.

Start with `storage`: hooks put values into an `EventStorage`. Its `collect` returns a `Packet` with the
values of a logging interval, which the background thread turns into events. The package may import torch,
`state` and packages below it, such as `events` and `util`.
"""

from eventloop.metrics.current import get_event_storage as get_event_storage
from eventloop.metrics.storage import EventStorage as EventStorage
