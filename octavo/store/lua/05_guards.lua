-- What this server process remembers of running sequences, so that an append need not read the record again.
--
-- A guard says who may append to a sequence, and how long the journals of its open branches are. It exists only while the
-- next append of its owner would be answered OK. `update` forgets it, as every change of a record that matters to an append
-- goes through there (`count_proof` and `announce` write to suspects, which have no guard); a server that begins or learns a
-- new generation forgets all. Nothing else may write to a record or a journal.

local MAX_GUARDS = 65536
local guards, num_guards = {}, 0

local function forget_guards() guards, num_guards = {}, 0 end

local function forget_guard(key)
  if guards[key] then guards[key], num_guards = nil, num_guards - 1 end
end

-- Remembers that `owner` may append to an open branch whose journal has so many tokens.
local function remember_guard(key, owner, epoch, max_tokens, branch, length)
  local guard = guards[key]
  if not guard then
    if num_guards >= MAX_GUARDS then forget_guards() end
    guard = { owner = owner, epoch = epoch, max_tokens = max_tokens }  -- and the journals' lengths, by branch
    guards[key], num_guards = guard, num_guards + 1
  end
  guard[branch] = length
end

-- Appends new tokens if a guard allows it. Returns the journal's length then; else nil, and nothing has changed.
local function append_guarded(key, journal, owner, epoch, branch, first, stop, tokens)
  local guard = guards[key]
  if not guard or guard[branch] ~= first or guard.epoch ~= epoch or guard.owner ~= owner
    or stop > guard.max_tokens then return nil end
  local length = redis.call('APPEND', journal, tokens) / 4
  if length == stop then
    guard[branch] = length
    return length
  end
  -- Someone else has deleted or changed the journal. It gets back what it had before.
  forget_guard(key)
  local before = 4 * (length - stop + first)
  if before == 0 then redis.call('DEL', journal)
  else redis.call('SET', journal, redis.call('GETRANGE', journal, 0, before - 1), 'KEEPTTL') end
  return nil
end
