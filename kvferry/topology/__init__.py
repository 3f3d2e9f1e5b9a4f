"""Who holds which cells: geometries, transfer plans, and what they cost."""

from kvferry.topology.geometry import EngineGeometry, ParallelShape, Part, RankCoordinates

__all__ = ["EngineGeometry", "ParallelShape", "Part", "RankCoordinates"]
