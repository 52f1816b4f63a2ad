-- How a sequence ends: branch by branch, and with its last branch as a whole, for good.

local function clear_quarantine(store, rec)
  local key = store.prefix .. 'quarantine:' .. rec.owner
  local mark = redis.call('GET', key)
  if mark and string.match(mark, '^(%S+)') == rec.id then redis.call('DEL', key) end
end

-- Writes the last changes to a record with which the sequence ends.
local function close(store, rec, fields, now)
  local state = 'DONE'
  if string.find(fields.finishes, STOPPED.ERROR, 1, true) then state = 'FAILED'
  elseif string.find(fields.finishes, STOPPED.CANCELLED, 1, true) then state = 'CANCELLED' end
  local never_ran = rec.state == 'QUEUED' and rec.epoch == '0'
  if rec.state == 'QUEUED' then leave_queue(store, rec, false) end
  fields.state, fields.timeline = state, timeline_with(rec, now, 'ended ' .. state)
  if rec.mig_to ~= '' then fields.mig_to = '' end
  update(rec, fields)
  forget_indexes(store, rec)
  if rec.crashes ~= '0' then clear_quarantine(store, rec) end
  local output = keep_ended(store, rec)
  correct_charge(store, rec, not never_ran and output or nil)
  quotas.leave(store, rec, not never_ran and output or nil, now)
  notify(rec, 'ended')
end

-- Ends a branch, or with -1 all branches that run, with a digit of FinishReason. `length` and `score` may be nil. The
-- sequence ends with its last branch.
local function finish(store, rec, branch, reason, length, failure, score)
  local first, last = branch, branch
  if branch == -1 then first, last = 0, #rec.finishes - 1 end
  local finishes = rec.finishes
  local fields = {}
  for b = first, last do
    if string.sub(finishes, b + 1, b + 1) == '0' then
      finishes = string.sub(finishes, 1, b) .. reason .. string.sub(finishes, b + 2)
      if length then fields['length' .. b] = length end
      if score then fields['score' .. b] = string.format('%.17g', score) end
    end
  end
  fields.finishes = finishes
  if failure ~= '' and rec.failure == '' then fields.failure = failure end
  if string.find(finishes, '0', 1, true) then update(rec, fields) else close(store, rec, fields, now_ms()) end
end

-- Moves the end of a branch back to `length`, if the worker has gone past a stop string.
local function cut(rec, branch, length, score)
  local done = string.sub(rec.finishes, branch + 1, branch + 1)
  if done ~= CUT.STOP and done ~= CUT.LENGTH then return end
  if length >= tonumber(rec['length' .. branch] or journal_length(rec, branch)) then return end
  local finishes = string.sub(rec.finishes, 1, branch) .. CUT.STOP .. string.sub(rec.finishes, branch + 2)
  update(rec, { finishes = finishes, ['length' .. branch] = length })
  redis.call('HDEL', rec.key, 'score' .. branch)
  if score then update(rec, { ['score' .. branch] = string.format('%.17g', score) }) end
end

-- KEYS: generation, record.
-- a: branch or -1, reason digit, delivered length or '', failure JSON or '', score or '', epoch or '' (any)
-- Reply: {'OK', 1} if the branch (with -1: a branch) ends for this reason, now or before; else {'OK', 0}.
define('finish', function(store, keys, branch, reason, length, failure, score, epoch)
  local rec = fetch(keys[2])
  branch, length, score = tonumber(branch), tonumber(length), tonumber(score)
  if not rec or branch >= #rec.finishes then return { 'OK', 0 } end
  if epoch ~= '' and rec.epoch ~= epoch then return { 'OK', 0 } end
  touch(rec.key)  -- so that its tail is read once
  if length and length > journal_length(rec, branch) then return { 'OK', 0 } end
  if not ended(rec) then finish(store, rec, branch, reason, length, failure, score) end
  if reason == CUT.STOP and length and branch >= 0 then cut(rec, branch, length, score) end
  local finishes = branch == -1 and rec.finishes or string.sub(rec.finishes, branch + 1, branch + 1)
  return { 'OK', string.find(finishes, reason, 1, true) and 1 or 0 }
end, true)
