"""On the path of servers with several ranks, whose queues would starve each other on few cores.

vLLM's readers call ``os.sched_yield`` in a loop for a second after every message. With more such
loops than cores some thread waits for seconds at a time; a short sleep ends that.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0.0002)
