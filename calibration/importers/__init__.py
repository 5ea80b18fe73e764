"""What other people's engines tell about a pair: their files in, the numbers of a plan out.

Every importer says what it learned, what it could not learn, and which assumption over which range stands in for it.
"""
