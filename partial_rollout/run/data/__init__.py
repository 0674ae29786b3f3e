"""Scripts that bring public data sets into verl's parquet format."""
