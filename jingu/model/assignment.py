"""The balanced assignment of tokens to experts (BASE layers, Lewis et al., 2021), computed by an auction.

Shapes: B rows, T tokens of a row, E experts with S = ⌈T/E⌉ seats each. Rows are padded to E·S tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Parameters of the auction: the smallest raise of a bid, and the temperature of the first prices, both relative to the
# range of a row's scores; the Sinkhorn iterations for the first prices; the growth of the raise per round. With these
# values, 512 to 4096 tokens get one of 8 to 64 experts in 10 to 70 rounds, within 0.1% of the optimum.
_RAISE, _SOFTNESS, _PASSES, _GROWTH = 0.005, 0.01, 30, 1.05


@torch.library.custom_op("jingu::balanced_assignment", mutates_args=())
def balanced_assignment(scores_BTE: Tensor) -> Tensor:
    """Return the expert of each token [B, T], int64, such that the sum of scores is almost the largest possible.

    No expert gets more than ⌈T/E⌉ tokens of a row. This is the auction of Bertsekas and Castañon (1989) for similar
    objects. In each round, every token without a seat bids for its best expert: the price at which the second-best
    expert would be equally good, plus a small raise. An expert keeps the S highest bids, and the lowest of these is its
    price. All rows bid at once.

    On a GPU, the host waits for the device once per round, to learn whether all tokens have a seat.
    """
    rows, tokens, experts = scores_BTE.shape
    if experts == 1:
        return scores_BTE.new_zeros(rows, tokens, dtype=torch.int64)
    seats = math.ceil(tokens / experts)
    # With scores that are not finite (of a diverged run), the auction would never end: replace them. Padding has the
    # same score for all experts.
    scores_BET = scores_BTE.detach().double().nan_to_num(0.0, 1e30, -1e30).transpose(1, 2)
    scores_BET = F.pad(scores_BET, (0, experts * seats - tokens)).contiguous()
    spread_B1 = (scores_BET.amax((1, 2)) - scores_BET.amin((1, 2))).unsqueeze(1)
    spread_B1 = torch.where(spread_B1 > 0, spread_B1, 1.0)
    scores_BET = scores_BET + spread_B1.unsqueeze(2) * _tie_breaks(scores_BET)
    # Start with good prices and no token seated.
    price_BE, raise_B1 = _first_prices(scores_BET, seats, spread_B1 * _SOFTNESS), spread_B1 * _RAISE
    expert_BT = torch.full((rows, experts * seats), -1, dtype=torch.int64, device=scores_BET.device)
    bid_BT = scores_BET.new_zeros(expert_BT.shape)
    every_E1 = torch.arange(experts, device=scores_BET.device).unsqueeze(1)
    while bool((expert_BT < 0).any()):
        # Each waiting token bids for the expert with the best score minus price.
        values_B2T, choices_B2T = (scores_BET - price_BE.unsqueeze(2)).topk(2, dim=1)
        best_BT, waits_BT = choices_B2T[:, 0], expert_BT < 0
        offer_BT = price_BE.gather(1, best_BT) + values_B2T[:, 0] - values_B2T[:, 1] + raise_B1
        expert_BT = torch.where(waits_BT, best_BT, expert_BT)
        bid_BT = torch.where(waits_BT, offer_BT, bid_BT)
        # Each expert keeps the S highest bids. The other tokens lose their seat and wait.
        bids_BET = torch.where(expert_BT.unsqueeze(1) == every_E1, bid_BT.unsqueeze(1), -torch.inf)
        kept_BES, winners_BES = bids_BET.topk(seats, dim=2)
        keeps_BET = torch.zeros_like(bids_BET, dtype=torch.bool).scatter_(2, winners_BES, kept_BES > -torch.inf)
        expert_BT = torch.where(keeps_BET.any(1), expert_BT, -1)
        # The lowest kept bid is the price. It is -inf while seats are free, which leaves the price unchanged.
        price_BE = torch.maximum(price_BE, kept_BES[..., -1])
        # Growing raises end long sequences of bids between a few tokens.
        raise_B1 = raise_B1 * _GROWTH
    return expert_BT[:, :tokens].contiguous()


def _tie_breaks(scores_BET: Tensor) -> Tensor:
    """Return a bias [E, T] of up to 1e-6 that grows with the number of the expert and with the position of the token.

    If a token occurs twice at the start of a row, both have the same scores up to rounding. The bias decides between
    them, so that rounding does not.
    """
    _, experts, tokens = scores_BET.shape
    ranks_E1, ranks_T = (
        torch.linspace(0, 1, n, dtype=scores_BET.dtype, device=scores_BET.device) for n in (experts, tokens)
    )
    return 1e-6 * ranks_E1.unsqueeze(1) * ranks_T


def _first_prices(scores_BET: Tensor, seats: int, softness_B1: Tensor) -> Tensor:
    """Return prices [B, E] at which a softmax choice of the tokens fills the seats almost evenly (Sinkhorn, 1967)."""
    soft_BET = scores_BET / softness_B1.unsqueeze(2)
    price_BE1 = torch.zeros_like(soft_BET[..., :1])
    for _ in range(_PASSES):
        shares_BET = soft_BET - (soft_BET - price_BE1).logsumexp(1, keepdim=True)
        price_BE1 = shares_BET.logsumexp(2, keepdim=True) - math.log(seats)
    return price_BE1.squeeze(2) * softness_B1


@balanced_assignment.register_fake
def _(scores_BTE: Tensor) -> Tensor:
    return scores_BTE.new_empty(scores_BTE.shape[:2], dtype=torch.int64)
