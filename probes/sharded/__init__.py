"""Models whose weights or vocabulary are spread over ranks."""
