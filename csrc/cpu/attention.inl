// Attention of some queries to pages. A tile of keys is taken once for all rows (queries x heads of the group); tiles
// lie at fixed positions and a row sees them in order, so that its bits do not depend on what runs beside it: rows are
// computed up to four together, each with the operations it would have alone.

#include "attention/tile.inl"

#include "attention/pages.inl"

#include "attention/mask.inl"

#include "attention/scores.inl"

#include "attention/values.inl"

#include "attention/merge.inl"

#include "attention/item.inl"
