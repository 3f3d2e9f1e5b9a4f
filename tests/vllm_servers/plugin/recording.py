"""Our connector, writing down what each rank lent and loaded, with digests of every cell.

A server loads it by its module's name; ``record_digests`` must be set. ``RECORDS`` names the folder
for its lines of JSON, one file per process.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from kvferry.integrations.vllm import KVFerryConnector


class RecordingConnector(KVFerryConnector):
    """See the module."""

    def build_connector_worker_meta(self) -> Any:
        """Writes down the records of this step."""
        report = super().build_connector_worker_meta()
        if report is not None and report.records:
            with (Path(os.environ["RECORDS"]) / str(os.getpid())).open("ab") as file:
                for record in report.records:
                    file.write(msgspec.json.encode(record) + b"\n")
        return report
