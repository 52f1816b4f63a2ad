-- How a sequence gets an owner: a take, and what speaks for it or against it.

-- Gives the sequence to a new owner at the next epoch. `migration` is the number of the migration that does it, or 0.
local function hand_over(store, rec, owner, take_id, migration)
  set_owner(store, rec, owner)
  update(rec, {
    state = 'RUNNING', epoch = tonumber(rec.epoch) + 1, take_id = take_id,
    mig_number = 0, mig_to = '', last_mig = migration,
  })
  set_deadline(store, rec)
  expire_all(rec, ALIVE_MS)
  if tonumber(rec.crashes) >= POISON_CRASHES - 1 then
    local mark = string.format('%s %.0f', rec.id, now_ms() + QUARANTINE_MS)
    redis.call('SET', store.prefix .. 'quarantine:' .. owner, mark, 'PX', QUARANTINE_MS + LEASE_LINGER_MS)
  end
  notify(rec, 'taken')
end

-- Whether this worker runs another suspect alone. If the worker dies, that suspect is blamed.
local function runs_another_suspect(store, owner, rec, now)
  local mark = redis.call('GET', store.prefix .. 'quarantine:' .. owner)
  if not mark then return false end
  local id, stop = string.match(mark, '^(%S+) (%d+)$')
  return id ~= rec.id and tonumber(stop) > now
end

-- Counts a crash of the owner. True for one too many.
local function count_crash(store, rec, now)
  if runs_another_suspect(store, rec.owner, rec, now) then return false end
  local suspects = {}
  for suspect in string.gmatch(rec.suspects, '[^,]+') do suspects[#suspects + 1] = suspect end
  suspects[#suspects + 1] = rec.owner
  if #suspects > MAX_SUSPECTS then table.remove(suspects, 1) end
  update(rec, { crashes = tonumber(rec.crashes) + 1, suspects = table.concat(suspects, ',') })
  return tonumber(rec.crashes) >= POISON_CRASHES
end

-- Whether the sequence must wait for another suspect on this worker: a crash of both would blame neither.
local function must_wait(store, rec, owner, lost, now)
  local crashes = tonumber(rec.crashes)
  if lost and rec.owner ~= owner and not runs_another_suspect(store, rec.owner, rec, now) then crashes = crashes + 1 end
  return crashes == POISON_CRASHES - 1 and runs_another_suspect(store, owner, rec, now)
end

-- Whether the owner has stopped on purpose. Its sequences may be taken at once, and a take from it counts no crash.
local function has_left(store, owner) return redis.call('EXISTS', store.prefix .. 'left:' .. owner) == 1 end

-- For how many ms the lease still protects the owner from a take for this reason. A router that has lost its connection
-- to the owner needs less than the end of the lease as evidence, and yet more than its own word: a missed renewal.
local function protected_ms(store, owner, why, now)
  local stop, length = lease_of(store, owner)
  if why == 'connection' then
    stop = math.min(stop, stop - length + math.floor(length / RENEWALS_PER_LEASE) + LATE_RENEWAL_MS)
  end
  return math.max(0, stop - now)
end

-- The reply to a take; 1 if the new owner is to run the sequence alone.
local function take_reply(status, rec, retry_ms)
  return { status, rec.epoch, rec.crashes, retry_ms or 0, tonumber(rec.crashes) >= POISON_CRASHES - 1 and 1 or 0 }
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

-- KEYS: generation, record.  a: expected epoch, new owner, take id, why, failure JSON for poison
-- Reply: {status, epoch, crashes, retry ms, 1 if it is to run alone}
define('take', function(store, keys, expected, owner, take_id, why, poison)
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
  if must_wait(store, rec, owner, lost, now) then return take_reply('FROZEN', rec, SUSPECT_RETRY_MS) end
  if lost and rec.owner ~= owner and count_crash(store, rec, now) then
    update(rec, { take_id = take_id })
    finish(store, rec, -1, STOPPED.ERROR, nil, poison)
    return take_reply('POISON', rec)
  end
  leave_queue(store, rec)
  note(rec, now, 'taken', owner .. ' ' .. why)
  update(rec, { proof = 0 })
  hand_over(store, rec, owner, take_id, 0)
  return take_reply('OK', rec)
end, true)
