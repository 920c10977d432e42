"""What a cluster can be told about hosts."""

__all__: list[str] = []
