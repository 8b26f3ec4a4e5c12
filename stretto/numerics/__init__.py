"""The numerics laboratory: what long sums lose in narrow numbers, by formula, by emulation and by measurement.

formats has numbers of any width; sums, what rounds after every addition, and the accumulator of Hopper's FP8 products;
laws, their errors as formulas; survey, the long sums of a recipe, for `stretto numerics`; probe, a measurement of the
accumulator of a real device. laws and survey need no torch.
"""
