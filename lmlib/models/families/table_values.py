"""What tables of the vocabulary, and the norm before a tied one's second use, begin with."""


def table_values(embed: int, tied: bool) -> tuple[float, float]:
    """What `embedding_deviation` is to be, and the first scale of the last norm. A tied table
    embeds and unembeds: the norm between its two uses makes up for their difference, and makes
    logits that start small (`tied_scale`), as `unembedding_scale` makes those of an untied one. So
    the first loss is ln(vocab) to 0.1.

    benchmarks/initial_values.py chose them, with residual writes / √(2 · layers): nats per token of
    held-out text after 200 steps of 512 tokens, the better of two rates, the mean of three seeds
    (their standard deviation is 0.03, the median over all runs).

        embed, layers                   32, 2  32, 6  64, 2  64, 6  128, 2  128, 6
        all by fan-in, table embed^-½   4.927  5.134  4.876  5.061   4.712   4.911
        GPT-2's 0.02                    4.690  4.779  4.527  4.840   4.839   5.249
        table 1                         4.499  4.508  4.199  4.226   4.123   4.054
        table 1, logits embed^-½        4.462  4.488  4.221  4.370   4.135   4.100
        tied: all by fan-in             5.084  5.273  4.880  5.209   4.770
        tied: GPT-2's 0.02              5.490  5.623  5.268  5.635   4.938
        tied: table 1                   5.074  5.066  4.675  4.756   4.447   4.525
        tied: table 1, logits embed^-½  5.056  5.053  4.653  4.744   4.380   4.496
        tied: table 1/4                 4.755  4.827  4.488  4.666   4.452   4.463
        tied: table 1/2                 4.833  4.876  4.510  4.629   4.397   4.431
        table 1, logits 0.4                                  4.231           4.028
        table 1, logits 0.3                                  4.254           4.033
        table 1, logits 0.25                          4.182  4.275
        table 1, logits 0                             4.430  4.650
        tied: table 1/2, logits embed^-½              4.509  4.643
        tied: table 1/2, logits 0                     4.528  4.683

    Logits have standard deviation 1 unless it is said. Untied ones that start smaller cost nothing
    down to about 0.35; a head of zeros costs a lot, a tied one little. (The tied pair at 128, 6 was
    measured on another validation text: embed^-½ cost 0.007.)
    """
    return (0.5, tied_scale(embed, 0.5)) if tied else (1.0, 1.0)


def tied_scale(embed: int, deviation: float) -> float:
    """The first scale of the last norm with which the logits of a tied table of this deviation
    start with standard deviation embed^-1/2, as `table_values` has it. The logit of the token that
    is read, whose row is in the residual stream, then starts below 1, whatever the width."""
    return 1 / (deviation * embed)
