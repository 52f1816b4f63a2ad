-- How a sequence gets an owner: a take, and what speaks for it or against it.

-- Gives the sequence to a new owner at the next epoch. `migration` is the number of the migration that does it, or 0;
-- `line` is for the timeline.
local function hand_over(store, rec, owner, take_id, migration, now, line)
  move_to_owner(store, rec, owner)
  update(rec, {
    owner = owner, state = 'RUNNING', epoch = tonumber(rec.epoch) + 1, take_id = take_id, proof = 0,
    alone = runs_alone(store, rec, now) and 1 or 0, mig_number = 0, mig_to = '', last_mig = migration,
    timeline = timeline_with(rec, now, line),
  })
  if rec.alone == '1' and not runs_another_suspect(store, owner, rec, now) then begin_quarantine(store, rec, now, 0) end
  notify(rec, 'taken')
end

-- Whether the owner has stopped on purpose. Its sequences may be taken at once, and a take from it counts no crash.
local function has_left(store, owner) return redis.call('EXISTS', store.prefix .. 'left:' .. owner) == 1 end

-- For how many ms the lease still protects the owner from a take for this reason. A router that has lost its connection
-- to the owner needs less than the end of the lease as evidence, and yet more than its own word: the owner's lifeline to
-- the store has broken, too, or it has missed a renewal.
local function protected_ms(store, owner, why, now)
  local stop, length, heard = lease_of(store, owner)
  if why == 'connection' then
    local lives = redis.call('PUBLISH', store.prefix .. 'lifeline:' .. owner, '') > 0
    if heard == '1' and not lives then return 0 end
    stop = math.min(stop, stop - length + math.floor(length / RENEWALS_PER_LEASE) + LATE_RENEWAL_MS)
  end
  return math.max(0, stop - now)
end

-- The reply to a take; 1 if the new owner is to run the sequence alone.
local function take_reply(status, rec, retry_ms)
  return { status, rec.epoch, rec.crashes, retry_ms or 0, rec.alone == '1' and 1 or 0 }
end

-- The reply of this take if it was done before; else nil.
local function answered(rec, expected, take_id)
  if rec.take_id ~= take_id then return nil end
  if tonumber(rec.epoch) == expected + 1 then return take_reply('SAME', rec) end
  if tonumber(rec.epoch) == expected and rec.state == 'FAILED' then return take_reply('POISON', rec) end
  return nil
end

-- The reply that refuses a take for this reason; nil if nothing refuses it.
local function refusal(store, rec, why, now)
  if (rec.state == 'QUEUED') ~= (why == 'queued') then return take_reply('FENCED', rec) end
  if (why ~= 'lease' and why ~= 'connection') or has_left(store, rec.owner) then return nil end
  if store.frozen_until > now then return take_reply('FROZEN', rec, store.frozen_until - now) end
  local wait_ms = protected_ms(store, rec.owner, why, now)
  return wait_ms > 0 and take_reply('ALIVE', rec, wait_ms) or nil
end

-- Notes the class of numerics in which tokens are computed from now on. A change after the first token is told.
local function note_numerics(rec, numerics, now)
  if rec.numerics == numerics then return end
  local fields, num_tokens = { numerics = numerics }, 0
  if rec.numerics ~= '' and numerics ~= '' then
    for branch = 0, #rec.finishes - 1 do num_tokens = num_tokens + journal_length(rec, branch) end
  end
  if num_tokens > 0 then
    fields.numerics_changes = tonumber(rec.numerics_changes) + 1
    fields.timeline = timeline_with(rec, now, 'numerics ' .. rec.numerics .. ' ' .. numerics)
  end
  update(rec, fields)
end

-- KEYS: generation, record.
-- a: expected epoch, new owner, take id, why, how long OCCUPIED has kept it waiting in ms, failure JSON for poison,
--    the new owner's class of numerics, what was seen of the old owner or '' (a program of revision 20 sends none)
-- Reply: {status, epoch, crashes, retry ms, 1 if it is to run alone}
define('take', function(store, keys, expected, owner, take_id, why, waited_ms, poison, numerics, seen)
  local rec = fetch(keys[2])
  if not rec then return { 'GONE', 0, 0, 0, 0 } end
  expected = tonumber(expected)
  local before = answered(rec, expected, take_id)
  if before then return before end
  if ended(rec) then return take_reply('CLOSED', rec) end
  if tonumber(rec.epoch) ~= expected then return take_reply('FENCED', rec) end
  local now = now_ms()
  local refused = refusal(store, rec, why, now)
  if refused then return refused end

  local deadline = tonumber(rec.deadline_ms)
  if rec.cancel == '1' or (deadline > 0 and deadline <= now) then
    finish(store, rec, -1, rec.cancel == '1' and STOPPED.CANCELLED or STOPPED.DEADLINE, nil, '')
    return take_reply('CLOSED', rec)
  end
  local lost = (why == 'lease' or why == 'connection') and not has_left(store, rec.owner)
  local before_death = { crashes = rec.crashes, suspects = rec.suspects, first_crash_ms = rec.first_crash_ms }
  if lost and rec.owner ~= owner and judge_death(store, rec, now) then
    update(rec, { take_id = take_id })
    finish(store, rec, -1, STOPPED.ERROR, nil, poison)
    return take_reply('POISON', rec)
  end
  if is_occupied(store, rec, owner, tonumber(waited_ms), now) then
    update(rec, before_death)  -- the owner keeps the sequence, and may live; the take that follows judges again
    return take_reply('OCCUPIED', rec, OCCUPIED_RETRY_MS)
  end
  if not lost and rec.crashes ~= '0' then clear_quarantine(store, rec) end
  if rec.state == 'QUEUED' then leave_queue(store, rec, true) end
  hand_over(store, rec, owner, take_id, 0, now, with_seen('taken ' .. owner .. ' ' .. why, seen))
  note_numerics(rec, numerics, now)
  return take_reply('OK', rec)
end, true)

-- A worker calls it before it begins to run a sequence that had an owner before. If the worker runs it alone, nothing else
-- runs there from before this call until the sequence has ended or proved itself: so another suspect's quarantine is over.
-- KEYS: generation, record.  a: epoch, owner.  Reply: {'OK', 1 if this worker owns the sequence at this epoch}
define('announce', function(store, keys, epoch, owner)
  local state, is_epoch, is_owner, crashes, alone = fetch_fields(keys[2], 'state', 'epoch', 'owner', 'crashes', 'alone')
  if state ~= 'RUNNING' or is_epoch ~= epoch or is_owner ~= owner then return { 'OK', 0 } end
  if crashes ~= '0' then
    redis.call('HSET', keys[2], 'announced', epoch)
    begin_quarantine(store, { id = id_of(keys[2]), owner = owner, alone = alone }, now_ms(), 1)
  end
  return { 'OK', 1 }
end, true)

-- Tokens that the owner has computed since the take, and that no journal shows before their branch ends.
-- KEYS: generation, record.  a: epoch, owner, tokens of the output.  Reply: {'OK', OK | OK_CANCEL | FENCED | CLOSED | GONE}
define('progress', function(store, keys, epoch, owner, tokens)
  local rec = fetch(keys[2])
  if not rec then return { 'OK', 'GONE' } end
  if rec.epoch ~= epoch or rec.owner ~= owner or rec.state == 'QUEUED' then return { 'OK', 'FENCED' } end
  if ended(rec) then return { 'OK', 'CLOSED' } end
  note_progress(store, rec, tonumber(tokens))
  return { 'OK', rec.cancel == '1' and 'OK_CANCEL' or 'OK' }
end, true)
