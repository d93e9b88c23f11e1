"""slime's data sources."""

from asyncrl.compat.data_sources import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer"]
