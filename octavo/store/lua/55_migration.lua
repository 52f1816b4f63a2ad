-- How a sequence moves to another owner without a stop: by a migration, which has a number within its epoch.
--
-- A record keeps the highest number of its epoch that a migration was begun or aborted with (mig_number), the target of
-- that migration while it is under way (mig_to), and the number of the migration that began the epoch (last_mig, or 0).

-- The reply that refuses a call, unless the sequence runs at this epoch; else nil.
local function not_running(rec, epoch)
  if rec.epoch ~= epoch or rec.state == 'QUEUED' then return { 'FENCED', rec.epoch } end
  if ended(rec) then return { 'CLOSED', rec.epoch } end
  return nil
end

-- Whether the migration of this number has made the epoch after `epoch`.
local function committed(rec, epoch, number)
  return tonumber(rec.epoch) == tonumber(epoch) + 1 and tonumber(rec.last_mig) == number
end

local function under_way(rec, number, target)
  return tonumber(rec.mig_number) == number and rec.mig_to == target and target ~= ''
end

-- Only a number above all before it begins a migration: a call that comes late revives nothing.
-- KEYS: generation, record.  a: epoch, number, target.  Reply: {status, epoch}
define('mig_begin', function(store, keys, epoch, number, target)
  local rec = fetch(keys[2])
  if not rec then return { 'GONE', 0 } end
  local refused = not_running(rec, epoch)
  if refused then return refused end
  number = tonumber(number)
  if under_way(rec, number, target) then return { 'SAME', rec.epoch } end
  if number <= tonumber(rec.mig_number) then return { 'OUTDATED', rec.epoch } end
  update(rec, { mig_number = number, mig_to = target })
  note(rec, now_ms(), 'migrating', target)
  return { 'OK', rec.epoch }
end, true)

-- The target calls it when it holds all blocks and tokens.
-- KEYS: generation, record.  a: epoch, number, target, journal length of each branch.  Reply: {status, epoch}
define('mig_commit', function(store, keys, epoch, number, target, ...)
  local rec = fetch(keys[2])
  if not rec then return { 'GONE', 0 } end
  number = tonumber(number)
  if committed(rec, epoch, number) and rec.owner == target then return { 'SAME', rec.epoch } end
  local refused = not_running(rec, epoch)
  if refused then return refused end
  if not under_way(rec, number, target) then return { 'NO_MIGRATION', rec.epoch } end
  local lengths = { ... }
  if #lengths ~= #rec.finishes then return { 'GAP', rec.epoch } end
  for i, length in ipairs(lengths) do
    if journal_length(rec, i - 1) ~= tonumber(length) then return { 'GAP', rec.epoch } end
  end
  hand_over(store, rec, target, '', number, now_ms(), 'migrated ' .. target)
  return { 'OK', rec.epoch }
end, true)

-- The source calls it. The number is used up, so that this migration can be neither committed nor begun any more.
-- KEYS: generation, record.  a: epoch, number.  Reply: {status, epoch}
define('mig_abort', function(store, keys, epoch, number)
  local rec = fetch(keys[2])
  if not rec then return { 'GONE', 0 } end
  number = tonumber(number)
  if committed(rec, epoch, number) then return { 'COMMITTED', rec.epoch } end
  local refused = not_running(rec, epoch)
  if refused then return refused end
  local last = tonumber(rec.mig_number)
  if number < last then return { 'ABORTED', rec.epoch } end
  if rec.mig_to ~= '' then note(rec, now_ms(), 'stayed', rec.owner) end
  if number > last or rec.mig_to ~= '' then update(rec, { mig_number = number, mig_to = '' }) end
  return { 'ABORTED', rec.epoch }
end, true)
