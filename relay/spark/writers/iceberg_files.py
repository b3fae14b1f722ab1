"""The data files of an Iceberg table: how relay writes rows to them, and where.

Source: PyIceberg 0.12, `LocationProvider`. Iceberg documentation, "Object Store File Layout".
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import uuid4

import pyarrow as pa
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionKey
from pyiceberg.table import TableProperties
from pyiceberg.table.locations import LocationProvider, load_location_provider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Properties

from relay.spark.writers.arrow import MOST_KEY_BYTES, MOST_NAME_BYTES

_TABLES_OWN = "relay.location-provider"


def data_files(metadata: TableMetadata, rows: pa.Table, io: FileIO) -> Iterable[DataFile]:
    """Write rows to files whose names nobody else uses; yields them. Raises PyIceberg's errors."""
    properties = {
        **metadata.properties,
        _TABLES_OWN: metadata.properties.get(TableProperties.WRITE_PY_LOCATION_PROVIDER_IMPL, ""),
        TableProperties.WRITE_PY_LOCATION_PROVIDER_IMPL: f"{__name__}.{ShortLocations.__name__}",
    }
    located = metadata.model_copy(update={"properties": properties})
    return _dataframe_to_data_files(located, rows, io, uuid4())


class ShortLocations(LocationProvider):
    """The locations that the table's properties say, without the partition where a name or the key is too long.

    The manifests have a file's partition, and no reader takes it from the path.
    """

    def __init__(self, table_location: str, table_properties: Properties) -> None:
        super().__init__(table_location, table_properties)
        given = {
            **table_properties,
            TableProperties.WRITE_PY_LOCATION_PROVIDER_IMPL: table_properties.get(_TABLES_OWN, ""),
        }
        self._given = load_location_provider(table_location, given)

    def new_data_location(
        self, data_file_name: str, partition_key: PartitionKey | None = None
    ) -> str:
        """A location for a file of a name that is its own."""
        location = self._given.new_data_location(data_file_name, partition_key)
        names = [len(each.encode()) for each in location.split("/")]
        if sum(names) + len(names) <= MOST_KEY_BYTES and max(names) <= MOST_NAME_BYTES:
            return location
        return self._given.new_data_location(data_file_name)
