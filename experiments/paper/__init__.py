"""The published figures of SSD (arXiv 2603.03251) beside what this repository predicts from a part of them."""
