"""The dump contract: columns, metadata, writing, reading, checking."""
