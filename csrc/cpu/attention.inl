// Attention of some queries to pages. A tile of keys is read once for all rows (queries x heads of the group). Tiles
// lie at fixed positions, and a row sees them in order. Up to four rows are computed together, each with the operations
// it would have alone, so the bits of a row do not depend on the other rows.

#include "attention/tile.inl"

#include "attention/pages.inl"

#include "attention/mask.inl"

#include "attention/scores.inl"

#include "attention/values.inl"

#include "attention/merge.inl"

#include "attention/item.inl"
