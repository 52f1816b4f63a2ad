// Attention of some queries to pages. A tile of keys is packed once for all rows (queries x heads of the group). Tiles
// and the splits they are part of lie at fixed positions, and a row sees them in order, each with the operations it
// would have alone: so the bits of a row do not depend on the other rows, nor on whether it is computed in a decode or
// in a chunk of a prompt.

#include "attention/tile.inl"

#include "attention/pages.inl"

#include "attention/mask.inl"

#include "attention/products.inl"

#include "attention/floats.inl"

#include "attention/bf16_pairs.inl"

#include "attention/scores.inl"

#include "attention/merge.inl"

#include "attention/item.inl"
