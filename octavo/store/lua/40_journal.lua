-- The journal: one string of packed little-endian u32 per branch. Its length is the number of committed tokens.

local OK, OK_CANCEL, DUP, FENCED, CLOSED, GAP, CONFLICT, GONE = 0, 1, 2, 3, 4, 5, 6, 7

-- Checkpoints come long before, unless a worker gets no replies and repeats its items again and again.
local MAX_TAIL_BYTES = 1024 * 1024

-- The owner itself ends a branch, so it need not be told that the record has changed.
local function finish_appended(store, key, branch, reason, failure, score)
  local rec, tail = fetch(key), joined[key]
  local lane = leave_tail(key)
  finish(store, rec, branch, tostring(reason), nil, failure, score == score and score or nil)
  if lane and not ended(rec) then stay_in_tail(key, tail) end
end

-- Appends one item; returns the status, the journal's length, and how many more tokens of the branch may go into the
-- owner's tail (nil: none). Only the owner at the record's epoch may write, and only at the end. It may send again what it
-- has sent before. `cached` is nil, or how many tokens of the prompt a prefix cache had.
local function append(store, key, owner, epoch, branch, first, count, reason, tokens, failure, score, cached)
  local journal, stop = journal_of(key, branch), first + count
  local state, is_epoch, is_owner, finishes, cancelled, crashes, max_tokens =
    fetch_fields(key, 'state', 'epoch', 'owner', 'finishes', 'cancel', 'crashes', 'max_tokens')
  if not state then return GONE, 0 end
  if branch >= #finishes then return CONFLICT, 0 end
  local length = redis.call('STRLEN', journal) / 4
  if first > length and joined[key] then
    settle(key)
    length = redis.call('STRLEN', journal) / 4
  end
  if tonumber(is_epoch) ~= epoch or is_owner ~= owner or state == 'QUEUED' then return FENCED, length end

  local done = string.byte(finishes, branch + 1) - 48
  local open = state == 'RUNNING' and done == 0
  if first > length then return open and GAP or CLOSED, length end
  if count > 0 and first < length then
    local known = math.min(stop, length)
    local written = redis.call('GETRANGE', journal, 4 * first, 4 * known - 1)
    if written ~= string.sub(tokens, 1, 4 * (known - first)) then return CONFLICT, length end
  end

  local fresh = stop - length
  if fresh <= 0 and reason == 0 and count > 0 then return DUP, length end
  if fresh == 0 and reason ~= 0 and done == reason then return DUP, length end
  if not open then return CLOSED, length end
  if stop > tonumber(max_tokens) or (fresh < 0 and reason ~= 0) then return CONFLICT, length end
  if fresh > 0 then
    length = redis.call('APPEND', journal, fresh == count and tokens or string.sub(tokens, -4 * fresh)) / 4
    if crashes ~= '0' then count_proof(store, key, fresh) end
  end
  if cached then redis.call('HSET', key, 'cached_tokens', cached) end
  if reason ~= 0 then finish_appended(store, key, branch, reason, failure, score)
  elseif cancelled == '0' and crashes == '0' and join_tail(store.prefix, owner, key) then
    return OK, length, tonumber(max_tokens) - length
  end
  return cancelled == '1' and OK_CANCEL or OK, length
end

-- KEYS: generation, then the record of each item.
-- a: the owner that appends; where its tail ends, if this is the last call of a checkpoint, else -1; then per item
-- <u64 epoch><u16 branch><u32 first><u32 count><u8 reason><u32 failure bytes><f64 score, NaN: none><tokens><failure>, packed.
-- Of a reason above 127 the rest is the reason, and behind the score stand the <u32 cached tokens>.
-- Reply: {'OK', version of the tail, then per item: status + 8 * journal length, how many more tokens may go into the tail}.
define('append_batch', function(store, keys, owner, tail_end, blob)
  local unpack_head, sub = struct.unpack, string.sub
  local tail, reply, at = tail_of(store.prefix, owner), { 'OK', 0 }, 1
  for i = 2, #keys do
    local epoch, branch, first, count, reason, size, score
    local cached
    epoch, branch, first, count, reason, size, score, at = unpack_head('<I8HI4I4BI4d', blob, at)
    if reason > 127 then
      reason = reason - 128
      cached, at = unpack_head('<I4', blob, at)
    end
    local tokens_end = at + 4 * count
    local failure = size > 0 and sub(blob, tokens_end, tokens_end + size - 1) or ''
    local tokens = sub(blob, at, tokens_end - 1)
    local status, length, room =
      append(store, keys[i], owner, epoch, branch, first, count, reason, tokens, failure, score, cached)
    reply[#reply + 1], reply[#reply + 2] = status + 8 * length, room or 0
    at = tokens_end + size
  end
  -- The end differs if the call comes late, after other items. Then these stay.
  tail_end = tonumber(tail_end)
  if tail_end >= 0 and lanes[tail] and tail_end == end_of(tail) then empty_tail(store.prefix, owner) end
  reply[2] = version_of(tail)
  return reply
end, true)

-- Appends tokens of sequences that have joined the tail of this owner.
-- KEYS: generation.  a: owner, version that it knows, items of the tail.
-- Reply: {'OK', bytes of the tail, where it ends}; or nothing was written: {'CHANGED', version, id, ...}: these have left
-- the tail since; or {'LOST'}: that is not known, the tail was emptied, and the worker must begin anew
define('append_tail', function(store, keys, owner, version, items)
  local tail = tail_of(store.prefix, owner)
  version = tonumber(version)
  if version == 0 or version ~= version_of(tail) then
    local reply = changes_since(tail, version)
    if not reply then settle_all(store.prefix, owner) end
    return reply or { 'LOST' }
  end
  local bytes = redis.call('APPEND', tail, items)
  if bytes == #items then
    redis.call('SADD', store.prefix .. 'tails', owner)
    renew_tail(store.prefix, owner)
  end
  local stop = lanes[tail].emptied + bytes
  if bytes >= MAX_TAIL_BYTES then settle_all(store.prefix, owner) end
  return { 'OK', bytes, stop }
end, true)
