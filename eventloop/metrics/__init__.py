"""Collect numbers, images and histograms of a training without waiting for the device.

Start with `storage`, the `EventStorage` that users put values into.
"""

from eventloop.metrics.storage import EventStorage as EventStorage
from eventloop.metrics.storage import get_event_storage as get_event_storage
